package io.github.weightbus;

import java.util.Map;

/**
 * The state of a worker, and of one of its models. The running version is current, and the rest may
 * be slightly out of date.
 *
 * @param epoch of the session; 0 outside one
 * @param malformed messages dropped because they broke the protocol
 * @param shared versions are copied out of the publisher's memory
 * @param torn an apply failed half-way, and no version runs
 * @param running the version that runs, or null
 * @param arriving the version that arrives, or null
 * @param chunksHere number of its chunks that have arrived
 * @param chunks number of its chunks
 * @param staged the version that waits for a commit, or null
 * @param ready the version that waits for {@link Worker#receive} or is being applied, or null
 * @param metadata the publisher's metadata of the running version, under its current number
 */
public record State(long epoch, long malformed, boolean shared, boolean torn, Version running,
    Version arriving, long chunksHere, long chunks, Version staged, Version ready,
    Map<String, String> metadata) {
  /** A version of a model. */
  public record Version(long epoch, long version) {
    private static Version of(long epoch, long version) {
      return version == 0 ? null : new Version(epoch, version);
    }
  }

  static State of(Lib.RawState raw, Map<String, String> metadata) {
    return new State(raw.epoch, raw.malformed, raw.shared != 0, raw.torn != 0,
        Version.of(raw.running_epoch, raw.running_version),
        Version.of(raw.arriving_epoch, raw.arriving_version), raw.chunks_here, raw.chunks,
        Version.of(raw.staged_epoch, raw.staged_version),
        Version.of(raw.ready_epoch, raw.ready_version), metadata);
  }
}
