package io.github.weightbus;

/**
 * A complete, verified version that a user function accepts or rejects.
 *
 * @param snapshot in {@code apply}, the snapshot of a model received as snapshots; valid only
 *     during the call and in its thread; otherwise null
 */
public record Offer(String model, long epoch, long version, long nbytes, Snapshot snapshot) {}
