package io.github.weightbus;

import com.sun.jna.CallbackThreadInitializer;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.function.Consumer;

/** Wraps user functions as callbacks of the library. JNA prints an exception that leaves one. */
final class Callbacks {
  private Callbacks() {}

  /** Returns a callback that passes each event to a function, in the library's thread. */
  static Lib.OnEvent onEvent(Consumer<Event> function) {
    Lib.OnEvent callback = (raw, user) -> {
      function.accept(new Event(raw.kind, raw.model, raw.epoch, raw.version, raw.code, raw.text));
    };
    // The library's thread becomes a daemon: the program's exit does not wait for it.
    Native.setCallbackThreadInitializer(
        callback, new CallbackThreadInitializer(true, false, "weightbus-worker"));
    return callback;
  }

  /** Returns a callback that lets a function decide, in the thread that calls receive(). */
  static Lib.OnOffer onOffer(Decide function) {
    return (raw, text, room, user) -> {
      try (Snapshot snapshot = raw.snapshot == null ? null : new Snapshot(raw)) {
        function.decide(new Offer(raw.model, raw.epoch, raw.version, raw.nbytes, snapshot));
        return 0;
      } catch (Throwable thrown) {
        String why = thrown.getMessage() == null ? thrown.toString() : thrown.getMessage();
        writeText(why, text, (int) room);
        return 1;
      }
    };
  }

  private static void writeText(String why, Pointer text, int room) {
    byte[] bytes = Arrays.copyOf(why.getBytes(StandardCharsets.UTF_8), room); // padded with zeros
    bytes[room - 1] = 0;
    text.write(0, bytes, 0, room);
  }
}
