package io.github.weightbus;

import com.sun.jna.Native;
import com.sun.jna.Pointer;
import com.sun.jna.ptr.LongByReference;
import com.sun.jna.ptr.PointerByReference;
import java.time.Duration;
import java.util.Collections;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;

/**
 * A version that was just applied.
 *
 * @param nbytes the size in bytes
 * @param digest the digest, as reported to the publisher; "" for a version from shared memory
 * @param took the duration of the copy
 * @param snapshot the snapshot, which you close, of a model received as snapshots; otherwise null
 * @param metadata the publisher's texts by name, such as a step or a reward
 */
public record Update(String model, long epoch, long version, long nbytes, String digest,
    Duration took, Snapshot snapshot, Map<String, String> metadata) {
  /** Converts an update of the library. The caller uses the worker's handle. */
  static Update of(Pointer worker, Lib.RawUpdate raw) {
    return new Update(Lib.RawUpdate.text(raw.model), raw.epoch, raw.version, raw.nbytes,
        Lib.RawUpdate.text(raw.digest), Duration.ofNanos(raw.nanoseconds),
        raw.snapshot == null ? null : new Snapshot(raw),
        metadataOf(worker, Lib.RawUpdate.text(raw.model), raw.epoch, raw.version)
            .orElseGet(Map::of));
  }

  /** Returns the metadata of a version; empty if the version is no longer known. */
  static Optional<Map<String, String>> metadataOf(
      Pointer worker, String model, long epoch, long version) {
    PointerByReference place = new PointerByReference();
    int status = Lib.LIB.wb_metadata_of(worker, model, epoch, version, place);
    if (status == Lib.NOTHING) {
      return Optional.empty();
    }
    WeightbusException.check(status);
    Pointer metadata = place.getValue();
    try {
      LongByReference count = new LongByReference();
      Pointer texts = Lib.LIB.wb_metadata_all(metadata, count);
      Map<String, String> all = new TreeMap<>();
      for (long at = 0; at < 2 * count.getValue(); at += 2) { // a wb_text is two pointers
        Pointer name = texts.getPointer(at * Native.POINTER_SIZE);
        Pointer text = texts.getPointer((at + 1) * Native.POINTER_SIZE);
        all.put(name.getString(0, "UTF-8"), text.getString(0, "UTF-8"));
      }
      return Optional.of(Collections.unmodifiableMap(all));
    } finally {
      Lib.LIB.wb_metadata_free(metadata);
    }
  }
}
