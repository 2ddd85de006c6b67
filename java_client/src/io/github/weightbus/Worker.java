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
 * A worker: receives versions of models from a publisher in the background, in a thread of the
 * library, and applies them in {@link #receive}. Any thread may call any method.
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
    volatile Thread eventThread; // the library's thread, while it calls onEvent; otherwise null
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
   * preference. When an address fails, the worker changes over to the next one. It returns to the
   * first address once a publisher answers there.
   */
  public static Builder builder(List<String> addresses) {
    return new Builder(String.join(",", addresses));
  }

  /** The settings of a worker, which {@link #connect} starts. */
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

    /** Applies the versions of the model with this id in the memory of {@code model}. */
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
     * Sets this worker's keys, for a publisher with keys: the path of the worker's file, as {@code
     * weightbus keygen} writes it, the path of the folder, or the contents of the file, which begin
     * with a brace. Default: the environment variable WEIGHTBUS_KEYS, if it is set; "": no keys.
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

    /** Does not use shared memory, even if the publisher is on this host. */
    public Builder networkOnly() {
      raw.network_only = 1;
      return this;
    }

    /** Accepts versions with tensors that this worker's models lack, and ignores these tensors. */
    public Builder partial() {
      raw.partial = 1;
      return this;
    }

    /** Converts values if dtypes differ and both are F64, F32, F16 or BF16. */
    public Builder cast() {
      raw.cast = 1;
      return this;
    }

    /**
     * Connects to any data address that the publisher sends. By default the data address must be on
     * the host of the publisher's address, or be its path with a suffix; otherwise the worker does
     * not connect to it, and fetches all versions, which is slower.
     */
    public Builder anyDataHost() {
      raw.any_data_host = 1;
      return this;
    }

    /**
     * Sets a function that is called on each event. It must not block: the worker's own thread,
     * which answers the publisher, calls it.
     */
    public Builder onEvent(Consumer<Event> function) {
      onEvent = function;
      return this;
    }

    /**
     * Sets a function that accepts or rejects each version, before any reader sees the version and
     * before it is reported. After a rejection the previous snapshot stays current. A {@link Model}
     * already holds the new version, so that after a rejection it is torn. In the function, read
     * the model without {@link Model#read}, which would wait until the function returns.
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
     * Sets the deadline of each call of {@code apply} and {@code beforeApply}, at most a day.
     * Default: 60 s. If a call takes longer, its version is rejected, and no other version of its
     * model is applied until the function has returned.
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
     * @throws WeightbusException a setting is invalid ("invalid"), or a socket or thread cannot be
     *     created ("system")
     */
    public Worker connect() {
      Core core = new Core();
      core.models.putAll(models);
      core.onEvent = onEvent == null ? null : Callbacks.onEvent(event -> {
        core.eventThread = Thread.currentThread();
        try {
          onEvent.accept(event);
        } finally {
          core.eventThread = null;
        }
      });
      core.apply = apply == null ? null : Callbacks.onOffer(apply);
      core.beforeApply = beforeApply == null ? null : Callbacks.onOffer(beforeApply);
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
        Reference.reachabilityFence(wanted); // which owns the memory of the ids
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
   * Returns the address to which the worker is connected, or tries to connect.
   *
   * @throws WeightbusException the worker was closed ("closed")
   */
  public String address() {
    return handle.use(Lib.LIB::wb_worker_address);
  }

  /**
   * Applies the newest version that has arrived, waiting for a version if necessary, and returns
   * the update; empty if no version arrived in time. With a timeout of zero, does not wait. An
   * interrupt does not end the wait, but {@link #close} does.
   *
   * @throws WeightbusException a version was rejected: the previous version still runs, unless the
   *     message says that none does. Or the publisher refuses this worker, which keeps trying
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
   * Waits until the publisher has accepted this worker, and returns the publisher's epoch; empty if
   * the timeout has passed.
   *
   * @throws WeightbusException the worker is refused by the publisher, or was closed ("closed")
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

  /** Returns the worker's state, without that of a model. */
  public State state() {
    return state(null);
  }

  /**
   * Returns the worker's state, and the state of one of its models.
   *
   * @throws WeightbusException no such model ("invalid"), or the worker was closed ("closed")
   */
  public State state(String model) {
    Lib.RawState raw = new Lib.RawState();
    return handle.use(its -> {
      Optional<Map<String, String>> metadata;
      do { // the running version may be renamed between the two calls
        WeightbusException.check(Lib.LIB.wb_look(its, model, raw));
        metadata = raw.running_version == 0
            ? Optional.of(Map.of())
            : Update.metadataOf(its, model, raw.running_epoch, raw.running_version);
      } while (metadata.isEmpty());
      return State.of(raw, metadata.get());
    });
  }

  /** Returns the newest version of a model received as snapshots, if any; close the snapshot. */
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
   * Sends a bye and ends the worker's thread. Waiting calls of {@link #receive}, and most later
   * calls, throw "closed". A second call has no effect.
   *
   * @throws WeightbusException called in {@code onEvent}, in the thread to end ("invalid")
   */
  @Override
  public void close() {
    if (core.eventThread == Thread.currentThread()) {
      throw new WeightbusException("invalid",
          "worker \"" + name + "\" cannot be closed in onEvent: close it in another thread");
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
