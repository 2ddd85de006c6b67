package io.github.weightbus;

import com.sun.jna.Callback;
import com.sun.jna.Library;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import com.sun.jna.Structure;
import com.sun.jna.Structure.FieldOrder;
import com.sun.jna.ptr.LongByReference;
import com.sun.jna.ptr.PointerByReference;
import java.util.Map;

/**
 * Declares the functions and structures of {@code weightbus.h}, which documents them, under the
 * same names. A {@code size_t} is a long: 64 bits.
 */
interface Lib extends Library {
  /** The ABI number of these declarations, which is also in the library's soname. */
  int ABI = 1;

  int OK = 0;
  int NOTHING = 1;

  Lib LIB = load();

  /** Loads the library: from {@code jna.library.path}, the system's paths, or a jar. */
  private static Lib load() {
    Map<String, Object> options = Map.of(OPTION_STRING_ENCODING, "UTF-8");
    Lib lib = Native.load("libweightbus.so." + ABI, Lib.class, options);
    if (lib.wb_abi() != ABI) {
      throw new UnsatisfiedLinkError("libweightbus has ABI " + lib.wb_abi()
          + ", but this jar needs ABI " + ABI + ": install the library of the jar's release");
    }
    return lib;
  }

  int wb_abi();

  String wb_error();

  int wb_model_new(RawTensor tensors, long count, PointerByReference model);

  int wb_model_resident(RawTensor tensors, long count, PointerByReference model);

  void wb_model_free(Pointer model);

  int wb_read(
      Pointer model, PointerByReference reading, LongByReference epoch, LongByReference version);

  void wb_read_end(Pointer reading);

  int wb_connect(RawOptions options, PointerByReference worker);

  String wb_name(Pointer worker);

  String wb_worker_address(Pointer worker);

  int wb_joined(Pointer worker, int timeout_ms, LongByReference epoch);

  int wb_receive(Pointer worker, int timeout_ms, RawUpdate update);

  int wb_metadata_of(
      Pointer worker, String model, long epoch, long version, PointerByReference metadata);

  Pointer wb_metadata_all(Pointer metadata, LongByReference count);

  void wb_metadata_free(Pointer metadata);

  int wb_look(Pointer worker, String model, RawState state);

  int wb_latest(Pointer worker, String model, RawUpdate update);

  void wb_close(Pointer worker);

  void wb_worker_free(Pointer worker);

  Pointer wb_snapshot_tensors(Pointer snapshot, LongByReference count);

  int wb_snapshot_find(Pointer snapshot, String name, RawTensor tensor);

  void wb_snapshot_free(Pointer snapshot);

  /** A {@code wb_tensor}. */
  @FieldOrder({"name", "name_bytes", "dtype", "shape", "rank", "data", "nbytes"})
  class RawTensor extends Structure {
    public Pointer name;
    public long name_bytes;
    public String dtype;
    public Pointer shape;
    public long rank;
    public Pointer data;
    public long nbytes;
  }

  /** A {@code wb_wanted}. */
  @FieldOrder({"id", "model"})
  class RawWanted extends Structure {
    public String id;
    public Pointer model;
  }

  /** A {@code wb_event}. */
  @FieldOrder({"kind", "model", "epoch", "version", "code", "text"})
  class RawEvent extends Structure {
    public String kind;
    public String model;
    public long epoch;
    public long version;
    public String code;
    public String text;

    public RawEvent() {
      setAutoWrite(false); // the library owns it
    }
  }

  /** A {@code wb_offer}. */
  @FieldOrder({"model", "epoch", "version", "nbytes", "snapshot"})
  class RawOffer extends Structure {
    public String model;
    public long epoch;
    public long version;
    public long nbytes;
    public Pointer snapshot;

    public RawOffer() {
      setAutoWrite(false); // the library owns it
    }
  }

  /** A {@code wb_on_event}. */
  interface OnEvent extends Callback {
    void call(RawEvent event, Pointer user);
  }

  /** A {@code wb_decide}. */
  interface OnOffer extends Callback {
    int call(RawOffer offer, Pointer text, long room, Pointer user);
  }

  /** The {@code wb_options}. */
  @FieldOrder({"size", "address", "name", "wanted", "wanted_count", "bytes_max", "network_only",
      "on_event", "user", "apply", "before_apply", "apply_timeout_ms", "partial", "cast", "client",
      "keys", "whole_only", "any_data_host"})
  class RawOptions extends Structure {
    public long size;
    public String address;
    public String name;
    public Pointer wanted;
    public long wanted_count;
    public long bytes_max;
    public byte network_only;
    public OnEvent on_event;
    public Pointer user;
    public OnOffer apply;
    public OnOffer before_apply;
    public int apply_timeout_ms;
    public byte partial;
    public byte cast;
    public String client;
    public String keys;
    public byte whole_only;
    public long any_data_host;
  }

  /** A {@code wb_update}. */
  @FieldOrder({"epoch", "version", "nbytes", "nanoseconds", "snapshot", "model", "digest", "code"})
  class RawUpdate extends Structure {
    public long epoch;
    public long version;
    public long nbytes;
    public long nanoseconds;
    public Pointer snapshot;
    public byte[] model = new byte[129];
    public byte[] digest = new byte[65];
    public byte[] code = new byte[129];

    /** Returns the string in an array of bytes that ends with a zero. */
    static String text(byte[] zeroed) {
      return Native.toString(zeroed, "UTF-8");
    }
  }

  /** A {@code wb_state}. */
  @FieldOrder({"epoch", "malformed", "shared", "torn", "running_epoch", "running_version",
      "arriving_epoch", "arriving_version", "chunks_here", "chunks", "staged_epoch",
      "staged_version", "ready_epoch", "ready_version"})
  class RawState extends Structure {
    public long epoch;
    public long malformed;
    public byte shared;
    public byte torn;
    public long running_epoch;
    public long running_version;
    public long arriving_epoch;
    public long arriving_version;
    public long chunks_here;
    public long chunks;
    public long staged_epoch;
    public long staged_version;
    public long ready_epoch;
    public long ready_version;
  }
}
