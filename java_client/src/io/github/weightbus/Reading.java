package io.github.weightbus;

import com.sun.jna.Pointer;

/** Keeps a model unchanged until it is closed, in the thread that created it. */
public final class Reading implements AutoCloseable {
  private final Model model; // keeps its memory reachable
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

  /** Returns the epoch of the version in the model; 0 before the first. */
  public long epoch() {
    return epoch;
  }

  /** Returns the number of the version in the model; 0 before the first. */
  public long version() {
    return version;
  }

  /**
   * Ends the reading, so that versions are applied again. Closing it twice has no effect.
   *
   * @throws WeightbusException this is another thread ("invalid")
   */
  @Override
  public void close() {
    if (Thread.currentThread() != thread) {
      throw new WeightbusException(
          "invalid", "a reading is closed by the thread that asked for it");
    }
    if (raw != null) {
      Lib.LIB.wb_read_end(raw);
      raw = null;
    }
  }
}
