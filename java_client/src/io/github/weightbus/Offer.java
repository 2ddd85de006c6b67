package io.github.weightbus;

/**
 * A version, whole and verified, on which a function of yours decides.
 *
 * @param snapshot in {@code apply} of a model without memory of yours, for this call and this
 *     thread alone; else null
 */
public record Offer(String model, long epoch, long version, long nbytes, Snapshot snapshot) {}
