package io.github.weightbus;

import java.nio.ByteBuffer;

/** Converts the float types of weights to Java's. */
final class Floats {
  private Floats() {}

  /** Returns the size of a value in bytes; 0 if the dtype is not a float. */
  static int width(String dtype) {
    switch (dtype) {
      case "F64":
        return 8;
      case "F32":
        return 4;
      case "F16":
      case "BF16":
        return 2;
      case "F8_E4M3":
      case "F8_E5M2":
        return 1;
      default:
        return 0;
    }
  }

  /** Reads the remaining values of a buffer into an array, from an index on. */
  static void read(String dtype, ByteBuffer from, float[] to, int first) {
    int width = width(dtype);
    if (dtype.equals("F32")) {
      from.asFloatBuffer().get(to, first, from.remaining() / width);
      return;
    }
    for (int at = first; from.remaining() >= width; at++) {
      to[at] = next(dtype, from);
    }
  }

  private static float next(String dtype, ByteBuffer from) {
    switch (dtype) {
      case "F64":
        return (float) from.getDouble();
      case "BF16":
        return Float.intBitsToFloat(from.getShort() << 16);
      case "F16":
        return widen(from.getShort(), 5, 10, false);
      case "F8_E4M3": // no infinities; all bits set is NaN
        return widen(from.get(), 4, 3, true);
      default:
        return widen(from.get(), 5, 2, false);
    }
  }

  /**
   * Widens an IEEE-like float, in which the greatest exponent means infinity or NaN. If the format
   * is {@code finite}, it has no infinities, and only the pattern with all bits set is NaN.
   */
  static float widen(int bits, int exponentBits, int fractionBits, boolean finite) {
    int exponents = (1 << exponentBits) - 1;
    int fractions = (1 << fractionBits) - 1;
    int exponent = bits >> fractionBits & exponents;
    int fraction = bits & fractions;
    float sign = (bits >> exponentBits + fractionBits & 1) == 0 ? 1 : -1;
    if (exponent == exponents && (finite ? fraction == fractions : fraction != 0)) {
      return Float.NaN;
    }
    if (exponent == exponents && !finite) {
      return sign * Float.POSITIVE_INFINITY;
    }
    int whole = exponent == 0 ? fraction : fraction + fractions + 1;
    int power = Math.max(exponent, 1) - (exponents >> 1) - fractionBits;
    return sign * Math.scalb((float) whole, power);
  }
}
