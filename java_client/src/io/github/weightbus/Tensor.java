package io.github.weightbus;

import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.function.Consumer;

/**
 * A tensor, dense and row-major, with a dtype of safetensors ("F32", "BF16", "I64", ...). A tensor
 * that you make only describes a tensor of a {@link Model}; a tensor that you get from a {@link
 * Model} or a {@link Snapshot} has bytes.
 */
public final class Tensor {
  private static final int PIECE = 1 << 30; // a buffer has at most 2^31 - 1 bytes

  private final String name;
  private final String dtype;
  private final long[] shape;
  private final ByteBuffer memory; // caller-owned, or null
  private final Handle handle; // of the model or snapshot that owns the memory, or null
  private final Pointer data;
  private final long nbytes;

  private Tensor(String name, String dtype, long[] shape, ByteBuffer memory, Handle handle,
      Pointer data, long nbytes) {
    this.name = name;
    this.dtype = dtype;
    this.shape = shape;
    this.memory = memory;
    this.handle = handle;
    this.data = data;
    this.nbytes = nbytes;
  }

  /** Describes a tensor; without a shape, a scalar. */
  public static Tensor of(String name, String dtype, long... shape) {
    return new Tensor(name, dtype, shape.clone(), null, null, null, 0);
  }

  /** Describes a tensor of floats. */
  public static Tensor f32(String name, long... shape) {
    return of(name, "F32", shape);
  }

  /**
   * Returns this tensor in caller-owned memory, for {@link Model#of}. The memory is the remaining
   * bytes of a direct buffer; their number must fit the dtype and the shape.
   *
   * @throws WeightbusException the buffer is not direct, or is read-only ("invalid")
   */
  public Tensor in(ByteBuffer buffer) {
    if (!buffer.isDirect() || buffer.isReadOnly()) {
      throw new WeightbusException(
          "invalid", "tensor \"" + name + "\": versions need a direct buffer that can be written");
    }
    ByteBuffer rest = buffer.slice().order(ByteOrder.nativeOrder());
    Pointer start = Native.getDirectBufferPointer(rest);
    return new Tensor(name, dtype, shape, rest, null, start, rest.capacity());
  }

  /** Converts tensors for the library. */
  static Lib.RawTensor[] toRaw(List<Tensor> tensors) {
    Lib.RawTensor[] raw = (Lib.RawTensor[]) new Lib.RawTensor().toArray(tensors.size());
    for (int at = 0; at < raw.length; at++) {
      Tensor tensor = tensors.get(at);
      byte[] text = tensor.name.getBytes(StandardCharsets.UTF_8);
      Memory zeroed = new Memory(text.length + 1);
      zeroed.write(0, text, 0, text.length);
      zeroed.setByte(text.length, (byte) 0);
      raw[at].name = zeroed;
      raw[at].name_bytes = text.length;
      raw[at].dtype = tensor.dtype;
      raw[at].rank = tensor.shape.length;
      raw[at].data = tensor.data;
      raw[at].nbytes = tensor.nbytes;
      if (tensor.shape.length > 0) {
        raw[at].shape = new Memory(Long.BYTES * tensor.shape.length);
        raw[at].shape.write(0, tensor.shape, 0, tensor.shape.length);
      }
    }
    return raw;
  }

  /** Converts a tensor of the library, whose memory a handle owns. */
  static Tensor fromRaw(Lib.RawTensor raw, Handle handle) {
    byte[] text = raw.name.getByteArray(0, (int) raw.name_bytes);
    long[] shape = raw.rank == 0 ? new long[0] : raw.shape.getLongArray(0, (int) raw.rank);
    String name = new String(text, StandardCharsets.UTF_8);
    return new Tensor(name, raw.dtype, shape, null, handle, raw.data, raw.nbytes);
  }

  public String name() {
    return name;
  }

  public String dtype() {
    return dtype;
  }

  public long[] shape() {
    return shape.clone();
  }

  /** Returns the size in bytes; 0 if the tensor has no memory. */
  public long nbytes() {
    return nbytes;
  }

  /**
   * Returns the tensor's bytes, read-only and without a copy. In a {@link Model} the bytes change
   * with each version: read them under a {@link Reading}. A {@link Snapshot} keeps its memory, even
   * after it is closed, while the returned buffer, or one derived from it, is reachable.
   *
   * @throws WeightbusException the tensor has 2 GiB or more, has no memory, or is valid only during
   *     a call of a user function ("invalid"); its snapshot was closed ("closed")
   */
  public ByteBuffer bytes() {
    if (nbytes > Integer.MAX_VALUE) {
      throw wrong("has " + nbytes + " bytes: call bytes(offset, count), for some at a time");
    }
    return bytes(0, (int) nbytes);
  }

  /** Returns a part of the tensor's bytes, like {@link #bytes()}. */
  public ByteBuffer bytes(long offset, int count) {
    checkRange(offset, count);
    if (memory != null) {
      return inOrder(memory.slice((int) offset, count).asReadOnlyBuffer());
    }
    if (!handle.canBeKept()) {
      throw wrong("is valid only during this call: use floats() or copyTo()");
    }
    if (count == 0) {
      return ByteBuffer.allocateDirect(0).asReadOnlyBuffer();
    }
    return inOrder(handle.keep(unused -> data.getByteBuffer(offset, count)).asReadOnlyBuffer());
  }

  /**
   * Copies bytes from an offset on, up to the end of the tensor or of the buffer, and returns their
   * number. Unlike {@link #bytes()}, this does not keep a snapshot's memory.
   */
  public int copyTo(ByteBuffer to, long offset) {
    checkRange(offset, 0);
    int count = (int) Math.min(to.remaining(), nbytes - offset);
    pass(offset, count, to::put);
    return count;
  }

  /**
   * Returns a copy of the values of a tensor of F32, F64, F16, BF16, F8_E4M3 or F8_E5M2.
   *
   * @throws WeightbusException another dtype, or a tensor too large for an array ("invalid")
   */
  public float[] floats() {
    checkRange(0, 0);
    int width = Floats.width(dtype);
    if (width == 0 || nbytes / width > Integer.MAX_VALUE - 8) {
      throw wrong("of " + dtype + " and " + nbytes + " bytes does not fit an array of floats");
    }
    float[] values = new float[(int) (nbytes / width)];
    for (long at = 0; at < nbytes; at += PIECE) {
      int first = (int) (at / width);
      pass(at, (int) Math.min(PIECE, nbytes - at), from -> Floats.read(dtype, from, values, first));
    }
    return values;
  }

  /** Passes a part of the bytes to a function; they are valid during the call. */
  private void pass(long offset, int count, Consumer<ByteBuffer> to) {
    if (memory != null) {
      to.accept(inOrder(memory.slice((int) offset, count)));
    } else if (count > 0) {
      handle.use(unused -> {
        to.accept(inOrder(data.getByteBuffer(offset, count)));
        return null;
      });
    }
  }

  /** Returns the pointer to the tensor's bytes. */
  Pointer place() {
    return data;
  }

  private void checkRange(long offset, int count) {
    if (memory == null && handle == null) {
      throw wrong("has no memory: use the tensor of the model that was made from it");
    }
    if (offset < 0 || count < 0 || offset > nbytes - count) {
      throw wrong("has " + nbytes + " bytes, and not " + count + " from " + offset + " on");
    }
  }

  private static ByteBuffer inOrder(ByteBuffer buffer) {
    return buffer.order(ByteOrder.nativeOrder());
  }

  private WeightbusException wrong(String what) {
    return new WeightbusException("invalid", "tensor \"" + name + "\" " + what);
  }

  @Override
  public String toString() {
    return name + ": " + dtype + Arrays.toString(shape);
  }
}
