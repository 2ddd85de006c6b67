package io.github.weightbus;

import com.sun.jna.Pointer;

/** Keeps a model unchanged until the thread that created this reading closes it. */
public final class Reading implements AutoCloseable {
  private final Model model; // keeps the model's memory reachable
  private final Thread thread = Thread.currentThread();
  private final long epoch;
  private final long version;
  private Pointer raw;

  Reading(Pointer raw, Model model, long epoch, long version) {
    this.raw = raw;
    this.model = model;
    this.epoch = epoch;
    this.version = version;
  }

  public Model model() {
    return model;
  }

  /** Returns the epoch of the version in the model; 0 before the first version. */
  public long epoch() {
    return epoch;
  }

  /** Returns the number of the version in the model; 0 before the first version. */
  public long version() {
    return version;
  }

  /**
   * Ends the reading, so that versions are applied again. A second call has no effect.
   *
   * @throws WeightbusException the calling thread did not create the reading ("invalid")
   */
  @Override
  public void close() {
    if (Thread.currentThread() != thread) {
      throw new WeightbusException("invalid", "close a reading in the thread that created it");
    }
    if (raw != null) {
      Lib.LIB.wb_read_end(raw);
      raw = null;
    }
  }
}
