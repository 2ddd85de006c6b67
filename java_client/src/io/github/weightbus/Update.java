package io.github.weightbus;

import java.time.Duration;

/**
 * A version that was just applied.
 *
 * @param nbytes how many bytes it has
 * @param digest what they hash to, which the publisher was told; "" where they came out of the
 *     publisher's memory
 * @param took how long the copy took
 * @param snapshot the version of a model without memory of yours, else null; close it
 */
public record Update(String model, long epoch, long version, long nbytes, String digest,
    Duration took, Snapshot snapshot) {
  static Update of(Lib.RawUpdate told) {
    return new Update(Lib.RawUpdate.text(told.model), told.epoch, told.version, told.nbytes,
        Lib.RawUpdate.text(told.digest), Duration.ofNanos(told.nanoseconds),
        told.snapshot == null ? null : new Snapshot(told));
  }
}
