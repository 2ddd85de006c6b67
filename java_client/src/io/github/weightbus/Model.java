package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.ptr.LongByReference;
import com.sun.jna.ptr.PointerByReference;
import java.util.List;

/**
 * Memory for the versions of a model, into which only the library writes. The memory is valid as
 * long as this object, or a worker, tensor or buffer that uses the memory, is reachable.
 */
public final class Model {
  private final Handle handle;
  private final List<Tensor> tensors;

  private Model(Handle handle, List<Tensor> tensors) {
    this.handle = handle;
    this.tensors = tensors;
  }

  /**
   * Makes a model of caller-owned memory: each tensor is {@link Tensor#in} a buffer.
   *
   * @throws WeightbusException a buffer is missing, or its size does not fit the dtype and the
   *     shape ("invalid")
   */
  public static Model of(Tensor... tensors) {
    List<Tensor> all = List.of(tensors);
    Lib.RawTensor[] raw = rawOf(all);
    PointerByReference made = new PointerByReference();
    Pointer model = WeightbusException.made(Lib.LIB.wb_model_new(raw[0], raw.length, made), made);
    return new Model(new Handle("this model", model, Lib.LIB::wb_model_free, null), all);
  }

  /**
   * Makes a model in memory that the library allocates, with zeros. The library applies a version
   * of 2 MiB or more from the network by exchanging memory pages, without a copy: do not register
   * this memory with a device or a network card.
   *
   * @throws WeightbusException a description is invalid ("invalid"), or there is not enough memory
   *     ("system")
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
      throw new WeightbusException("invalid", "a model of no tensors: describe at least one");
    }
    return Tensor.toRaw(tensors);
  }

  /** Returns the model's tensors, in the order of their descriptions. */
  public List<Tensor> tensors() {
    return tensors;
  }

  /**
   * Returns the tensor with this name.
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
   * Waits until no version is being written, and returns a reading, which keeps the model unchanged
   * until you close it. Close it in this thread, which must not call {@link Worker#receive} before.
   *
   * @throws WeightbusException an apply failed half-way: there is nothing to read until another
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

  /** Returns the handle, which a worker uses until it is freed. */
  Handle handle() {
    return handle;
  }
}
