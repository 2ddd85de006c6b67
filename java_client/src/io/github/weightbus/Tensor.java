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
 * A tensor, dense and row-major, with a dtype of safetensors ("F32", "BF16", "I64", ...). Tensors
 * that you make describe those of a {@link Model}; tensors of a {@link Model} or a {@link Snapshot}
 * have its bytes.
 */
public final class Tensor {
  private static final int PIECE = 1 << 30; // a buffer has at most 2^31 - 1 bytes

  private final String name;
  private final String dtype;
  private final long[] shape;
  private final ByteBuffer memory; // caller-owned, or null
  private final Handle handle; // that owns its memory, or null
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

  /** Describes a tensor; without sizes it is a scalar. */
  public static Tensor of(String name, String dtype, long... shape) {
    return new Tensor(name, dtype, shape.clone(), null, null, null, 0);
  }

  /** Describes a tensor of floats. */
  public static Tensor f32(String name, long... shape) {
    return of(name, "F32", shape);
  }

  /**
   * Returns this tensor in caller-owned memory, for {@link Model#of}: the remaining bytes of a
   * direct buffer, whose number must fit the dtype and the shape.
   *
   * @throws WeightbusException the buffer is not direct, or is read-only ("invalid")
   */
  public Tensor in(ByteBuffer buffer) {
    if (!buffer.isDirect() || buffer.isReadOnly()) {
      throw new WeightbusException(
          "invalid", "tensor \"" + name + "\": versions need a direct buffer that can be written");
    }
    ByteBuffer rest = buffer.slice().order(ByteOrder.nativeOrder());
    Pointer there = Native.getDirectBufferPointer(rest);
    return new Tensor(name, dtype, shape, rest, null, there, rest.capacity());
  }

  /** Converts tensors for the library. */
  static Lib.RawTensor[] toRaw(List<Tensor> tensors) {
    Lib.RawTensor[] raw = (Lib.RawTensor[]) new Lib.RawTensor().toArray(tensors.size());
    for (int at = 0; at < raw.length; at++) {
      Tensor its = tensors.get(at);
      byte[] text = its.name.getBytes(StandardCharsets.UTF_8);
      Memory zeroed = new Memory(text.length + 1);
      zeroed.write(0, text, 0, text.length);
      zeroed.setByte(text.length, (byte) 0);
      raw[at].name = zeroed;
      raw[at].name_bytes = text.length;
      raw[at].dtype = its.dtype;
      raw[at].rank = its.shape.length;
      raw[at].data = its.data;
      raw[at].nbytes = its.nbytes;
      if (its.shape.length > 0) {
        raw[at].shape = new Memory(Long.BYTES * its.shape.length);
        raw[at].shape.write(0, its.shape, 0, its.shape.length);
      }
    }
    return raw;
  }

  /** Returns a tensor of the library, whose memory a handle owns. */
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

  /** Returns its size in bytes. */
  public long nbytes() {
    return nbytes;
  }

  /**
   * Returns its bytes, read-only and without a copy. In a {@link Model} they change with each
   * version: read them under a {@link Reading}. A {@link Snapshot} keeps its memory, even after it
   * is closed, while such a buffer, or one derived from it, can be reached.
   *
   * @throws WeightbusException it has 2 GiB or more, has no memory, or is valid only during a call
   *     ("invalid"); its snapshot was closed ("closed")
   */
  public ByteBuffer bytes() {
    if (nbytes > Integer.MAX_VALUE) {
      throw wrong("has " + nbytes + " bytes: ask for bytes(offset, count), some at a time");
    }
    return bytes(0, (int) nbytes);
  }

  /** Returns a part of its bytes, like {@link #bytes()}. */
  public ByteBuffer bytes(long offset, int count) {
    look(offset, count);
    if (memory != null) {
      return inOrder(memory.slice((int) offset, count).asReadOnlyBuffer());
    }
    if (!handle.canBeKept()) {
      throw wrong("is there for this call alone: take floats() or copyTo()");
    }
    if (count == 0) {
      return ByteBuffer.allocateDirect(0).asReadOnlyBuffer();
    }
    return inOrder(handle.keep(its -> data.getByteBuffer(offset, count)).asReadOnlyBuffer());
  }

  /**
   * Copies bytes from an offset on, up to the end of the tensor or of the buffer, and returns their
   * number. Keeps no memory: use this to read large snapshots in pieces.
   */
  public int copyTo(ByteBuffer to, long offset) {
    look(offset, 0);
    int count = (int) Math.min(to.remaining(), nbytes - offset);
    show(offset, count, to::put);
    return count;
  }

  /**
   * Returns a copy of its values as floats. The dtype is F32, F64, F16, BF16, F8_E4M3 or F8_E5M2.
   *
   * @throws WeightbusException it has another dtype, or is too large for an array ("invalid")
   */
  public float[] floats() {
    look(0, 0);
    int width = Floats.width(dtype);
    if (width == 0 || nbytes / width > Integer.MAX_VALUE - 8) {
      throw wrong("is of " + dtype + " and " + nbytes + " bytes: no array of floats");
    }
    float[] values = new float[(int) (nbytes / width)];
    for (long at = 0; at < nbytes; at += PIECE) {
      int first = (int) (at / width);
      show(at, (int) Math.min(PIECE, nbytes - at), from -> Floats.read(dtype, from, values, first));
    }
    return values;
  }

  /** Calls a function with a part of its bytes, which are valid during the call. */
  private void show(long offset, int count, Consumer<ByteBuffer> to) {
    if (memory != null) {
      to.accept(inOrder(memory.slice((int) offset, count)));
    } else if (count > 0) {
      handle.use(its -> {
        to.accept(inOrder(data.getByteBuffer(offset, count)));
        return null;
      });
    }
  }

  /** Returns the pointer to its bytes. */
  Pointer place() {
    return data;
  }

  private void look(long offset, int count) {
    if (memory == null && handle == null) {
      throw wrong("has no memory: ask the model that was made of it");
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
