package io.github.weightbus;

import com.sun.jna.Pointer;
import java.lang.ref.Cleaner;
import java.lang.ref.Reference;
import java.util.function.Consumer;
import java.util.function.Function;

/**
 * A handle of the library. It is freed once it is closed and no call uses it, or once it is
 * unreachable. A call on a closed handle throws an exception, and never accesses freed memory.
 */
final class Handle {
  private static final Cleaner CLEANER = Cleaner.create();

  private final String what;
  private final Pointer pointer;
  private final Thread only; // the only thread that may use the handle; null: any thread may
  private final Cleaner.Cleanable freeing;
  private int users;
  private boolean closed;

  /**
   * @param what the name of the object in error messages
   * @param keeps an object that the library uses until the handle is freed
   */
  Handle(String what, Pointer pointer, Consumer<Pointer> free, Object keeps) {
    this.what = what;
    this.pointer = pointer;
    this.only = null;
    this.freeing = CLEANER.register(this, () -> {
      free.accept(pointer);
      Reference.reachabilityFence(keeps);
    });
  }

  /** Makes a handle that the library frees; only this thread may use it, until it is closed. */
  Handle(String what, Pointer pointer) {
    this.what = what;
    this.pointer = pointer;
    this.only = Thread.currentThread();
    this.freeing = () -> {};
  }

  /** Calls a function with the pointer, which stays valid during the call. */
  <T> T use(Function<Pointer, T> call) {
    Pointer valid = begin();
    try {
      return call.apply(valid);
    } finally {
      end();
    }
  }

  /** Keeps the handle valid until {@link #end}. */
  private synchronized Pointer begin() {
    if (closed) {
      throw new WeightbusException("closed", what + " is closed");
    }
    if (only != null && only != Thread.currentThread()) {
      throw new WeightbusException("invalid", what + " may be used only by the thread that got it");
    }
    users++;
    return pointer;
  }

  private void end() {
    boolean last;
    synchronized (this) {
      users--;
      last = closed && users == 0;
    }
    if (last) {
      freeing.clean();
    }
  }

  /** Rejects further uses. The handle is freed when the last current use ends. */
  void close() {
    boolean last;
    synchronized (this) {
      closed = true;
      last = users == 0;
    }
    if (last) {
      freeing.clean();
    }
  }

  /** Returns whether {@link #keep} may be called. */
  boolean canBeKept() {
    return only == null;
  }

  /** Calls a function with the pointer, which stays valid while the result is reachable. */
  <T> T keep(Function<Pointer, T> call) {
    T result = call.apply(begin());
    CLEANER.register(result, this::end);
    return result;
  }
}
