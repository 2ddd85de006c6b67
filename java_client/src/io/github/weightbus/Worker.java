package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.ptr.LongByReference;
import com.sun.jna.ptr.PointerByReference;
import java.lang.ref.Reference;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.function.Consumer;

/**
 * A worker: receives versions of models from a publisher at all times, in a thread of the library,
 * and applies them in {@link #receive}. Any thread may call any method.
 */
public final class Worker implements AutoCloseable {
  private static final String CLIENT = "weightbus-java/0.1.0";
  private static final long UNSIGNED_MAX = 0xFFFFFFFFL;

  private final Core core;
  private final String name;
  private final Handle handle;

  private Worker(Core core, Pointer raw) {
    this.core = core;
    this.name = Lib.LIB.wb_name(raw);
    this.handle = new Handle("worker \"" + name + "\"", raw, Lib.LIB::wb_worker_free, core);
  }

  /** The objects that the library uses until the worker is freed. */
  private static final class Core {
    final Map<String, Model> models = new LinkedHashMap<>();
    Lib.OnEvent onEvent;
    Lib.OnOffer apply;
    Lib.OnOffer beforeApply;
    volatile Thread telling; // the worker's own, while it calls onEvent
  }

  /**
   * Returns a builder for a worker of the publisher at "tcp://HOST:PORT" or "ipc://PATH". The text
   * may have several addresses, separated by commas.
   */
  public static Builder builder(String address) {
    return new Builder(address);
  }

  /**
   * Returns a builder for a worker with several addresses, of relays and the publisher, in order of
   * preference. The worker changes over to the next one when one fails, and returns to the first
   * one once a publisher answers there.
   */
  public static Builder builder(List<String> addresses) {
    return new Builder(String.join(",", addresses));
  }

  /** The settings of a worker. Nothing is started before {@link #connect}. */
  public static final class Builder {
    private final Lib.RawOptions raw = new Lib.RawOptions();
    private final Map<String, Model> models = new LinkedHashMap<>();
    private Consumer<Event> onEvent;
    private Decide apply;
    private Decide beforeApply;

    private Builder(String address) {
      raw.address = address;
      raw.client = CLIENT;
    }

    /** Sets the worker's name, unique among the publisher's workers. Default: a generated name. */
    public Builder name(String name) {
      raw.name = name;
      return this;
    }

    /** Receives versions of a model in the memory of {@code model}. */
    public Builder inPlace(String id, Model model) {
      models.put(id, model);
      return this;
    }

    /** Receives each version of a model as a {@link Snapshot}, with any layout. */
    public Builder snapshots(String id) {
      models.put(id, null);
      return this;
    }

    /**
     * Sets this worker's keys, for a publisher with keys: the path of its file from {@code
     * weightbus keygen}, the path of the folder, or the contents of the file, which begin with a
     * brace. Default: the environment variable WEIGHTBUS_KEYS, if it is set; "": no keys.
     */
    public Builder keys(String keys) {
      raw.keys = keys;
      return this;
    }

    /** Sets the path of this worker's keys for each of its addresses, in the same order. */
    public Builder keys(List<String> paths) {
      if (paths.isEmpty()) {
        throw new WeightbusException("invalid", "no paths of keys: give some, or \"\" for no keys");
      }
      return keys(String.join(",", paths));
    }

    /** Sets the size of the largest version to accept, in bytes. Default: 64 GiB. */
    public Builder bytesMax(long bytes) {
      raw.bytes_max = bytes;
      return this;
    }

    /** Does not use shared memory when the publisher is on this host. */
    public Builder networkOnly() {
      raw.network_only = 1;
      return this;
    }

    /** Accepts versions with more tensors than the models here have, and ignores those. */
    public Builder partial() {
      raw.partial = 1;
      return this;
    }

    /** Converts values where dtypes differ, among F64, F32, F16 and BF16. */
    public Builder cast() {
      raw.cast = 1;
      return this;
    }

    /**
     * Connects to any data address that the publisher sends. Otherwise it must be on the host of
     * the publisher's address, or at its path with a suffix; if it is not, the worker fetches all
     * versions, which is slower.
     */
    public Builder anyDataHost() {
      raw.any_data_host = 1;
      return this;
    }

    /**
     * Sets a function that is called on each event, in the worker's own thread, which answers the
     * publisher: it must not block.
     */
    public Builder onEvent(Consumer<Event> function) {
      onEvent = function;
      return this;
    }

    /**
     * Sets a function that accepts or rejects a version, once, before any reader sees it and before
     * it is reported. After a rejection the previous snapshot stays. A {@link Model} already holds
     * the new version, to be read without {@link Model#read}, which would wait for this call; after
     * a rejection it is torn ("torn").
     */
    public Builder apply(Decide function) {
      apply = function;
      return this;
    }

    /**
     * Sets a function that decides before any byte of a model changes: after a rejection the
     * previous version still runs.
     */
    public Builder beforeApply(Decide function) {
      beforeApply = function;
      return this;
    }

    /**
     * Sets the time limit of each call of these two functions, at most a day. Default: 60 s. After
     * that the version is rejected, and its model accepts no other version until the function has
     * returned.
     */
    public Builder applyTimeout(Duration timeout) {
      if (timeout.isZero() || timeout.isNegative()) {
        throw new WeightbusException(
            "invalid", "an applyTimeout of " + timeout + ": choose one above zero, up to a day");
      }
      raw.apply_timeout_ms = milliseconds(timeout);
      return this;
    }

    /**
     * Starts the worker. The publisher may start later.
     *
     * @throws WeightbusException a setting is invalid ("invalid"), or there are no sockets or
     *     threads ("system")
     */
    public Worker connect() {
      Core core = new Core();
      core.models.putAll(models);
      core.onEvent = onEvent == null ? null : Callbacks.listening(event -> {
        core.telling = Thread.currentThread();
        try {
          onEvent.accept(event);
        } finally {
          core.telling = null;
        }
      });
      core.apply = apply == null ? null : Callbacks.deciding(apply);
      core.beforeApply = beforeApply == null ? null : Callbacks.deciding(beforeApply);
      raw.on_event = core.onEvent;
      raw.apply = core.apply;
      raw.before_apply = core.beforeApply;
      raw.size = raw.size();
      Lib.RawWanted[] wanted = wanted(core.models);
      raw.wanted = wanted.length == 0 ? null : wanted[0].getPointer();
      raw.wanted_count = wanted.length;
      PointerByReference made = new PointerByReference();
      try {
        return new Worker(core, WeightbusException.made(Lib.LIB.wb_connect(raw, made), made));
      } finally {
        Reference.reachabilityFence(wanted); // it owns the memory of the ids
      }
    }

    private static Lib.RawWanted[] wanted(Map<String, Model> models) {
      if (models.isEmpty()) {
        return new Lib.RawWanted[0];
      }
      Lib.RawWanted[] wanted = (Lib.RawWanted[]) new Lib.RawWanted().toArray(models.size());
      int at = 0;
      for (Map.Entry<String, Model> each : models.entrySet()) {
        Model model = each.getValue();
        wanted[at].id = each.getKey();
        wanted[at].model = model == null ? null : model.handle().use(its -> its);
        wanted[at++].write();
      }
      return wanted;
    }
  }

  /** Returns the worker's name. */
  public String name() {
    return name;
  }

  /**
   * Returns the address that the worker is with, or tries now.
   *
   * @throws WeightbusException it was closed ("closed")
   */
  public String address() {
    return handle.use(Lib.LIB::wb_worker_address);
  }

  /**
   * Applies the newest version that has arrived, waiting for one if necessary, and returns the
   * update; empty if none arrived in time. With a timeout of zero it does not wait. An interrupt
   * does not end the wait; {@link #close} does.
   *
   * @throws WeightbusException a version was rejected: the previous one still runs, unless the
   *     message says that none does; the publisher refuses this worker, which keeps trying
   *     ("name-taken", "keys", ...); each is thrown once. Or the worker was closed ("closed")
   */
  public Optional<Update> receive(Duration timeout) {
    Lib.RawUpdate raw = new Lib.RawUpdate();
    return handle.use(its -> {
      int status = Lib.LIB.wb_receive(its, milliseconds(timeout), raw);
      if (status == Lib.NOTHING) {
        return Optional.empty();
      }
      if (status != Lib.OK) {
        throw WeightbusException.of(status, raw);
      }
      return Optional.of(Update.of(its, raw));
    });
  }

  /**
   * Waits until the publisher has admitted this worker, and returns the publisher's epoch; empty if
   * it has not.
   *
   * @throws WeightbusException the publisher refuses this worker, or it was closed ("closed")
   */
  public OptionalLong joined(Duration timeout) {
    LongByReference epoch = new LongByReference();
    int status = handle.use(its -> Lib.LIB.wb_joined(its, milliseconds(timeout), epoch));
    if (status == Lib.NOTHING) {
      return OptionalLong.empty();
    }
    WeightbusException.check(status);
    return OptionalLong.of(epoch.getValue());
  }

  /** Returns the worker's state, without a model. */
  public State state() {
    return state(null);
  }

  /**
   * Returns the worker's state, and that of one of its models.
   *
   * @throws WeightbusException there is no such model ("invalid"), or it was closed ("closed")
   */
  public State state(String model) {
    Lib.RawState raw = new Lib.RawState();
    return handle.use(its -> {
      Optional<Map<String, String>> metadata;
      do { // it may get another name in between
        WeightbusException.check(Lib.LIB.wb_look(its, model, raw));
        metadata = raw.running_version == 0
            ? Optional.of(Map.of())
            : Update.metadataOf(its, model, raw.running_epoch, raw.running_version);
      } while (metadata.isEmpty());
      return State.of(raw, metadata.get());
    });
  }

  /** Returns the newest version of a model received as snapshots, if there is one; close it. */
  public Optional<Snapshot> latest(String model) {
    Lib.RawUpdate raw = new Lib.RawUpdate();
    return handle.use(its -> {
      int status = Lib.LIB.wb_latest(its, model, raw);
      if (status == Lib.NOTHING) {
        return Optional.empty();
      }
      WeightbusException.check(status);
      return Optional.of(new Snapshot(raw));
    });
  }

  /**
   * Sends a bye and ends the worker's thread. Waiting calls of {@link #receive}, and all later
   * calls, throw "closed". Closing it twice has no effect.
   *
   * @throws WeightbusException this is {@code onEvent}, in the thread that is to end ("invalid")
   */
  @Override
  public void close() {
    if (core.telling == Thread.currentThread()) {
      throw new WeightbusException("invalid",
          "worker \"" + name + "\" cannot be closed in onEvent: have another thread do it");
    }
    try {
      handle.use(its -> {
        Lib.LIB.wb_close(its);
        return null;
      });
    } catch (WeightbusException closedBefore) {
      return;
    }
    handle.close();
  }

  private static int milliseconds(Duration time) {
    if (time.isNegative()) {
      return 0;
    }
    boolean vast = time.compareTo(Duration.ofMillis(UNSIGNED_MAX - 1)) > 0;
    return (int) (vast ? UNSIGNED_MAX : time.plusNanos(999_999).toMillis());
  }
}
