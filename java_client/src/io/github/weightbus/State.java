package io.github.weightbus;

import java.util.Map;

/**
 * The state of a worker, and of one of its models. The running version is current; other values may
 * be slightly out of date.
 *
 * @param epoch the epoch of the session; 0 without a session
 * @param malformed how many messages were dropped because they broke the protocol
 * @param shared whether versions are copied out of the publisher's shared memory
 * @param torn whether an apply failed half-way, so that no version runs
 * @param running the version that runs, or null
 * @param arriving the version that is arriving, or null
 * @param chunksHere how many chunks of the arriving version have arrived
 * @param chunks how many chunks the arriving version has
 * @param staged the version that waits for a commit, or null
 * @param ready the version that waits for {@link Worker#receive} or is being applied, or null
 * @param metadata the publisher's metadata of the running version
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
