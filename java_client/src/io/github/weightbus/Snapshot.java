package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.Structure;
import com.sun.jna.ptr.LongByReference;
import java.util.ArrayList;
import java.util.List;

/**
 * A version of a model that has no memory of yours. It never changes. {@link #close} gives its
 * memory back for a version to come; without it that is left to the garbage collector, which knows
 * nothing of how large it is.
 */
public final class Snapshot implements AutoCloseable {
  private final Handle handle;
  private final String model;
  private final long epoch;
  private final long version;

  /** One of ours, which somebody closes. */
  Snapshot(Lib.RawUpdate told) {
    this.model = Lib.RawUpdate.text(told.model);
    this.epoch = told.epoch;
    this.version = told.version;
    this.handle = new Handle(toString(), told.snapshot, Lib.LIB::wb_snapshot_free, null);
  }

  /** One of an offer, to be closed when the call is over. */
  Snapshot(Lib.RawOffer offer) {
    this.model = offer.model;
    this.epoch = offer.epoch;
    this.version = offer.version;
    this.handle = new Handle("the offer of " + this, offer.snapshot);
  }

  public String model() {
    return model;
  }

  public long epoch() {
    return epoch;
  }

  public long version() {
    return version;
  }

  /**
   * Returns its tensors, in the order of their bytes.
   *
   * @throws WeightbusException it was closed ("closed")
   */
  public List<Tensor> tensors() {
    return handle.use(its -> {
      LongByReference count = new LongByReference();
      Pointer first = Lib.LIB.wb_snapshot_tensors(its, count);
      List<Tensor> tensors = new ArrayList<>();
      if (count.getValue() > 0) {
        Structure one = Structure.newInstance(Lib.RawTensor.class, first);
        for (Structure raw : one.toArray((int) count.getValue())) {
          raw.read();
          tensors.add(Tensor.fromRaw((Lib.RawTensor) raw, handle));
        }
      }
      return tensors;
    });
  }

  /**
   * Returns the tensor of a name, or of another name that its publisher gave it.
   *
   * @throws WeightbusException there is none ("not-found"), or it was closed ("closed")
   */
  public Tensor find(String name) {
    return handle.use(its -> {
      Lib.RawTensor raw = new Lib.RawTensor();
      WeightbusException.check(Lib.LIB.wb_snapshot_find(its, name, raw));
      return Tensor.fromRaw(raw, handle);
    });
  }

  /** Gives the memory back, once no buffer of it can be reached. To do so twice does nothing. */
  @Override
  public void close() {
    handle.close();
  }

  @Override
  public String toString() {
    return "version " + version + " of \"" + model + "\"";
  }
}
