package io.github.weightbus;

/**
 * A version, whole and verified, that a user function accepts or rejects.
 *
 * @param snapshot in {@code apply}, of a model received as snapshots; valid during this call and in
 *     this thread only; otherwise null
 */
public record Offer(String model, long epoch, long version, long nbytes, Snapshot snapshot) {}
