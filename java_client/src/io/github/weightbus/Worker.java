package io.github.weightbus;

import com.sun.jna.Pointer;
import com.sun.jna.ptr.LongByReference;
import com.sun.jna.ptr.PointerByReference;
import java.lang.ref.Reference;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.function.Consumer;

/**
 * A worker: it receives versions of models from a publisher at all times, in a thread of the
 * library's, and applies them where {@link #receive} is called. Any thread may call any method.
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

  /** What the library calls and writes to until a worker is freed. */
  private static final class Core {
    final Map<String, Model> models = new LinkedHashMap<>();
    Lib.OnEvent onEvent;
    Lib.OnOffer apply;
    Lib.OnOffer beforeApply;
    volatile Thread telling; // which calls onEvent now, and is the worker's own
  }

  /** Begins a worker of the publisher at "tcp://HOST:PORT" or "ipc://PATH". */
  public static Builder builder(String address) {
    return new Builder(address);
  }

  /** How a worker is set up. Nothing of it is done before {@link #connect}. */
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

    /** Names the worker, uniquely among the publisher's; else a name is made up. */
    public Builder name(String name) {
      raw.name = name;
      return this;
    }

    /** Has versions of a model written into this one. */
    public Builder inPlace(String id, Model model) {
      models.put(id, model);
      return this;
    }

    /** Has each version of a model handed out as a {@link Snapshot}, whatever its layout. */
    public Builder snapshots(String id) {
      models.put(id, null);
      return this;
    }

    /**
     * Gives this worker's keys, for a publisher that has some: the path of its file of {@code
     * weightbus keygen}, or of the folder, or what stands in the file, which begins with a brace.
     * Else the environment's WEIGHTBUS_KEYS says; "": there are none.
     */
    public Builder keys(String keys) {
      raw.keys = keys;
      return this;
    }

    /** Sets the bytes of the largest version to take; else they are 64 GiB. */
    public Builder bytesMax(long bytes) {
      raw.bytes_max = bytes;
      return this;
    }

    /** Does not copy out of the publisher's memory where it is on this host. */
    public Builder networkOnly() {
      raw.network_only = 1;
      return this;
    }

    /** Takes versions of more tensors than the models here have: they are passed over. */
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
     * Takes published data from another host than that of the address, or from any path, wherever
     * the publisher says. Else they must be on that host, or beside that path, or all is fetched,
     * which is slower.
     */
    public Builder anyDataHost() {
      raw.any_data_host = 1;
      return this;
    }

    /**
     * Has what happens told to a function. It is called in the worker's own thread, which answers
     * the publisher: it must not wait.
     */
    public Builder onEvent(Consumer<Event> function) {
      onEvent = function;
      return this;
    }

    /**
     * Has a function decide whether a version runs, once for each, before anybody reads it and
     * before it is reported. One that is turned down leaves the snapshot before it. In a {@link
     * Model} it is there already, to be read without {@link Model#read}, which would wait for this
     * call; turned down it leaves none ("torn").
     */
    public Builder apply(Decide function) {
      apply = function;
      return this;
    }

    /** The same before a byte of a model changes: what ran before runs on. */
    public Builder beforeApply(Decide function) {
      beforeApply = function;
      return this;
    }

    /**
     * Bounds what each call of the two may take, at most a day; else 60 s. After that the version
     * counts as turned down, and its model takes no other one until the function has returned.
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
     * Starts the worker. The publisher need not be there yet.
     *
     * @throws WeightbusException what was asked for makes no sense ("invalid"), or sockets or
     *     threads are not to be had ("system")
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
        Reference.reachabilityFence(wanted); // which has the memory of the ids
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

  /** Returns what the worker is called. */
  public String name() {
    return name;
  }

  /**
   * Applies the newest version that has arrived, waiting for one if need be, and returns what was
   * applied; nothing if none came in time. Zero does not wait. An interrupt does not end the wait;
   * {@link #close} does.
   *
   * @throws WeightbusException a version was not taken: what ran before still runs, unless the
   *     message says that none does; the publisher refuses this worker, which goes on asking
   *     ("name-taken", "keys", ...); each is thrown once. Or the worker was closed ("closed")
   */
  public Optional<Update> receive(Duration timeout) {
    Lib.RawUpdate told = new Lib.RawUpdate();
    return handle.use(its -> {
      int status = Lib.LIB.wb_receive(its, milliseconds(timeout), told);
      if (status == Lib.NOTHING) {
        return Optional.empty();
      }
      if (status != Lib.OK) {
        throw WeightbusException.of(status, told);
      }
      return Optional.of(Update.of(its, told));
    });
  }

  /**
   * Waits until the publisher has let this worker in, and returns its epoch; nothing if it has not.
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

  /** Returns how the worker stands, without a model. */
  public State state() {
    return state(null);
  }

  /**
   * Returns how the worker stands, and one of its models.
   *
   * @throws WeightbusException there is no such model ("invalid"), or it was closed ("closed")
   */
  public State state(String model) {
    Lib.RawState told = new Lib.RawState();
    return handle.use(its -> {
      Optional<Map<String, String>> said;
      do { // it may get another name meanwhile
        WeightbusException.check(Lib.LIB.wb_look(its, model, told));
        said = told.running_version == 0
            ? Optional.of(Map.of())
            : Update.saidOf(its, model, told.running_epoch, told.running_version);
      } while (said.isEmpty());
      return State.of(told, said.get());
    });
  }

  /**
   * Returns the newest version of a model without memory of yours, to be closed; if there is one.
   */
  public Optional<Snapshot> latest(String model) {
    Lib.RawUpdate told = new Lib.RawUpdate();
    return handle.use(its -> {
      int status = Lib.LIB.wb_latest(its, model, told);
      if (status == Lib.NOTHING) {
        return Optional.empty();
      }
      WeightbusException.check(status);
      return Optional.of(new Snapshot(told));
    });
  }

  /**
   * Says goodbye and ends the worker's thread: whoever waits in {@link #receive} gets "closed", and
   * so does whoever calls anything here from now on. To do so twice does nothing.
   *
   * @throws WeightbusException this is {@code onEvent}, in the very thread that is to end
   *     ("invalid")
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
