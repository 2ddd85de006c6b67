package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.Structure;
import com.sun.jna.ptr.LongByReference;
import java.util.ArrayList;
import java.util.List;

/**
 * A version of a model that is received as snapshots. A snapshot never changes. {@link #close}
 * releases its memory for a later version. Without {@link #close} the garbage collector releases
 * the memory, but perhaps late, since it does not know the memory's size.
 */
public final class Snapshot implements AutoCloseable {
  private final Handle handle;
  private final String model;
  private final long epoch;
  private final long version;

  /** Makes a snapshot that the user closes. */
  Snapshot(Lib.RawUpdate raw) {
    this.model = Lib.RawUpdate.text(raw.model);
    this.epoch = raw.epoch;
    this.version = raw.version;
    this.handle = new Handle(toString(), raw.snapshot, Lib.LIB::wb_snapshot_free, null);
  }

  /** Makes the snapshot of an offer, which is closed when the user function has returned. */
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
   * Returns the snapshot's tensors, in the order of their bytes.
   *
   * @throws WeightbusException the snapshot was closed ("closed")
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
   * Returns a tensor by its name, or by an alias from the publisher.
   *
   * @throws WeightbusException no such tensor ("not-found"), or the snapshot was closed ("closed")
   */
  public Tensor find(String name) {
    return handle.use(its -> {
      Lib.RawTensor raw = new Lib.RawTensor();
      WeightbusException.check(Lib.LIB.wb_snapshot_find(its, name, raw));
      return Tensor.fromRaw(raw, handle);
    });
  }

  /** Releases the memory once no buffer of it is reachable. A second call has no effect. */
  @Override
  public void close() {
    handle.close();
  }

  @Override
  public String toString() {
    return "version " + version + " of \"" + model + "\"";
  }
}
