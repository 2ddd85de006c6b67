package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.ptr.LongByReference;
import com.sun.jna.ptr.PointerByReference;
import java.util.List;

/**
 * Memory that versions of a model are written into, by the library alone. It is there for as long
 * as anybody can reach it: this, a worker, a tensor or a buffer of it.
 */
public final class Model {
  private final Handle handle;
  private final List<Tensor> tensors;

  private Model(Handle handle, List<Tensor> tensors) {
    this.handle = handle;
    this.tensors = tensors;
  }

  /**
   * Makes a model of memory of yours: each tensor {@link Tensor#in} a buffer.
   *
   * @throws WeightbusException one has another size than its dtype and shape say, or none
   *     ("invalid")
   */
  public static Model of(Tensor... tensors) {
    List<Tensor> all = List.of(tensors);
    Lib.RawTensor[] raw = rawOf(all);
    PointerByReference made = new PointerByReference();
    Pointer model = WeightbusException.made(Lib.LIB.wb_model_new(raw[0], raw.length, made), made);
    return new Model(new Handle("this model", model, Lib.LIB::wb_model_free, null), all);
  }

  /**
   * Makes a model in memory of the library's own, of zeros. A version of 2 MiB or more that comes
   * over the network gets there by an exchange of pages, which copies nothing: do not register this
   * memory with a device or a network card.
   *
   * @throws WeightbusException a description makes no sense ("invalid"); there is not so much
   *     memory ("system")
   */
  public static Model resident(Tensor... tensors) {
    Lib.RawTensor[] raw = rawOf(List.of(tensors));
    PointerByReference made = new PointerByReference();
    Pointer model =
        WeightbusException.made(Lib.LIB.wb_model_resident(raw[0], raw.length, made), made);
    Handle handle = new Handle("this model", model, Lib.LIB::wb_model_free, null);
    return new Model(
        handle, List.of(raw).stream().map(its -> Tensor.fromRaw(its, handle)).toList());
  }

  private static Lib.RawTensor[] rawOf(List<Tensor> tensors) {
    if (tensors.isEmpty()) {
      throw new WeightbusException("invalid", "a model of no tensors: describe one at least");
    }
    return Tensor.toRaw(tensors);
  }

  /** Returns its tensors, in the order in which they were described. */
  public List<Tensor> tensors() {
    return tensors;
  }

  /**
   * Returns the tensor of a name.
   *
   * @throws WeightbusException there is none ("not-found")
   */
  public Tensor tensor(String name) {
    return tensors.stream()
        .filter(its -> its.name().equals(name))
        .findFirst()
        .orElseThrow(()
                         -> new WeightbusException("not-found",
                             "no tensor \"" + name + "\" in this model: there are " + tensors));
  }

  /**
   * Waits until nobody writes here, and keeps everything as it is until the reading is closed, in
   * this thread, which does not call {@link Worker#receive} meanwhile.
   *
   * @throws WeightbusException an apply has failed half-way: there is nothing to read until another
   *     version is applied ("torn")
   */
  public Reading read() {
    PointerByReference made = new PointerByReference();
    LongByReference epoch = new LongByReference();
    LongByReference version = new LongByReference();
    int status = handle.use(its -> Lib.LIB.wb_read(its, made, epoch, version));
    return new Reading(
        WeightbusException.made(status, made), this, epoch.getValue(), version.getValue());
  }

  /** What a worker needs of this, for as long as it lives. */
  Handle handle() {
    return handle;
  }
}
