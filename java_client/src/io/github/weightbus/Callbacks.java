package io.github.weightbus;

import com.sun.jna.CallbackThreadInitializer;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.function.Consumer;

/** Wraps user functions for the library. No exception leaves them (JNA prints it). */
final class Callbacks {
  private Callbacks() {}

  /** Returns a callback for a function that gets each event, in the library's thread. */
  static Lib.OnEvent listening(Consumer<Event> to) {
    Lib.OnEvent call = (raw, user) -> {
      to.accept(new Event(raw.kind, raw.model, raw.epoch, raw.version, raw.code, raw.text));
    };
    // A daemon thread: it ends with the worker, and the program's exit does not wait for it.
    Native.setCallbackThreadInitializer(
        call, new CallbackThreadInitializer(true, false, "weightbus-worker"));
    return call;
  }

  /** Returns a callback for a function that decides, in the thread that receives. */
  static Lib.OnOffer deciding(Decide function) {
    return (raw, text, room, user) -> {
      try (Snapshot snapshot = raw.snapshot == null ? null : new Snapshot(raw)) {
        function.decide(new Offer(raw.model, raw.epoch, raw.version, raw.nbytes, snapshot));
        return 0;
      } catch (Throwable thrown) {
        String why = thrown.getMessage() == null ? thrown.toString() : thrown.getMessage();
        say(why, text, (int) room);
        return 1;
      }
    };
  }

  private static void say(String why, Pointer text, int room) {
    byte[] words = Arrays.copyOf(why.getBytes(StandardCharsets.UTF_8), room); // zeros after them
    words[room - 1] = 0;
    text.write(0, words, 0, room);
  }
}
