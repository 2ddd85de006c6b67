package io.github.weightbus;

import com.sun.jna.Pointer;
import java.lang.ref.Cleaner;
import java.lang.ref.Reference;
import java.util.function.Consumer;
import java.util.function.Function;

/**
 * A handle of the library's. It is freed when it is closed and nobody uses it any more, or when
 * nobody can: a call on what is closed is an exception, and never reaches memory that is gone.
 */
final class Handle {
  private static final Cleaner CLEANER = Cleaner.create();

  private final String what;
  private final Pointer pointer;
  private final Thread only;
  private final Cleaner.Cleanable freeing;
  private int users;
  private boolean closed;

  /**
   * @param what what to call it in words for people
   * @param keeps what the library goes on using until the handle is freed
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

  /** One that is the library's, until it is closed, and for this thread alone. */
  Handle(String what, Pointer pointer) {
    this.what = what;
    this.pointer = pointer;
    this.only = Thread.currentThread();
    this.freeing = () -> {};
  }

  /** Calls something with the pointer, which stays good for as long as that takes. */
  <T> T use(Function<Pointer, T> call) {
    Pointer its = begin();
    try {
      return call.apply(its);
    } finally {
      end();
    }
  }

  /** Has the handle stay until {@link #end}. */
  private synchronized Pointer begin() {
    if (closed) {
      throw new WeightbusException("closed", what + " is closed");
    }
    if (only != null && only != Thread.currentThread()) {
      throw new WeightbusException("invalid", what + " is for the thread that got it");
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

  /** Lets nobody use it any more. It is freed when the last of those who do has ended. */
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

  /** Whether {@link #keep} may be called. */
  boolean canBeKept() {
    return only == null;
  }

  /** Has the handle stay for as long as somebody can reach an object that looks behind it. */
  <T> T keep(Function<Pointer, T> look) {
    T looking = look.apply(begin());
    CLEANER.register(looking, this::end);
    return looking;
  }
}
