package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.ptr.PointerByReference;

/** The error of a failed call: a code for programs, and the library's text for people. */
public final class WeightbusException extends RuntimeException {
  private static final long serialVersionUID = 1;
  private static final String[] CODES = {"ok", "timeout", "rejected", "refused", "closed", "torn",
      "invalid", "not-found", "system", "panic"};

  private final String code;
  private final String model;
  private final long epoch;
  private final long version;

  WeightbusException(String code, String text) {
    this(code, text, "", 0, 0);
  }

  private WeightbusException(String code, String text, String model, long epoch, long version) {
    super(text);
    this.code = code;
    this.model = model;
    this.epoch = epoch;
    this.version = version;
  }

  /** Throws the error of this thread's last call of the library, unless its status is OK. */
  static void check(int status) {
    if (status != Lib.OK) {
      throw new WeightbusException(nameOf(status), Lib.LIB.wb_error());
    }
  }

  /** Returns the pointer that a call has created, unless the call failed. */
  static Pointer made(int status, PointerByReference place) {
    check(status);
    return place.getValue();
  }

  /** Returns the exception for a rejected version, or a refused worker. */
  static WeightbusException of(int status, Lib.RawUpdate raw) {
    String code = Lib.RawUpdate.text(raw.code);
    return new WeightbusException(code.isEmpty() ? nameOf(status) : code, Lib.LIB.wb_error(),
        Lib.RawUpdate.text(raw.model), raw.epoch, raw.version);
  }

  private static String nameOf(int status) {
    return status < CODES.length ? CODES[status] : "unknown";
  }

  /**
   * Returns a code of the protocol (section 13: "layout-mismatch", "name-taken", "apply", ...). For
   * an error that no message reports, returns "invalid", "torn", "closed", "timeout", "not-found",
   * "system" or "panic".
   */
  public String code() {
    return code;
  }

  /** Returns the model of a rejected version, otherwise "". */
  public String model() {
    return model;
  }

  /** Returns the epoch of a rejected version, otherwise 0. */
  public long epoch() {
    return epoch;
  }

  /** Returns the number of a rejected version, otherwise 0. */
  public long version() {
    return version;
  }
}
