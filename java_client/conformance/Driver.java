import io.github.weightbus.Decide;
import io.github.weightbus.Event;
import io.github.weightbus.Model;
import io.github.weightbus.Reading;
import io.github.weightbus.Snapshot;
import io.github.weightbus.State;
import io.github.weightbus.Tensor;
import io.github.weightbus.Update;
import io.github.weightbus.WeightbusException;
import io.github.weightbus.Worker;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.locks.LockSupport;
import java.util.function.Consumer;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import java.util.zip.CRC32C;

/**
 * Runs a worker for the conformance suite, and prints each of its events as a line of JSON.
 *
 * <p>The golden vectors test code inside libweightbus: the Rust client's driver runs them.
 */
final class Driver {
  private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
  private static final Duration LOOK = Duration.ofMillis(50); // between two checks whether to end
  private static final int PIECE = 1 << 18; // bytes
  private static final String USAGE =
      "usage: driver vectors DIR | driver worker ADDRESS --name NAME --models M1,M2 "
      + "[--in-place SPEC.json] [--no-tensors] [--bytes-max N] [--network] [--seconds S] "
      + "[--turn-down N,...] [--break N,...] [--apply-seconds S[:N,...]] [--apply-timeout S] "
      + "[--partial] [--cast] [--keys FILE]";

  private static volatile boolean over;
  private static volatile int status = 1;

  // Arguments.
  private final Worker.Builder builder;
  private final Set<String> ids = new LinkedHashSet<>();
  private final Map<String, Model> models = new LinkedHashMap<>();
  private boolean tensors = true;
  private boolean cast;
  private double seconds = 120;
  private Set<Long> turnedDown = Set.of();
  private Set<Long> broken = Set.of();
  private Set<Long> slow = Set.of();
  private double applySeconds;
  private final Map<String, State.Version> reported = new HashMap<>(); // last versions, by model

  private Driver(String address) {
    builder = Worker.builder(address).onEvent(Driver::hear);
  }

  public static void main(String[] words) throws Exception {
    if (words.length == 2 && words[0].equals("vectors")) {
      return;
    }
    if (words.length < 2 || !words[0].equals("worker")) {
      die(USAGE);
    }
    endOnSignal(Thread.currentThread());
    Driver driver = new Driver(words[1]);
    driver.parse(words);
    driver.follow();
    status = 0;
  }

  /** Ends the worker on SIGTERM. By itself the JVM would exit with 143, without sending a bye. */
  private static void endOnSignal(Thread main) {
    Runtime.getRuntime().addShutdownHook(new Thread(() -> {
      over = true;
      try {
        main.join();
      } catch (InterruptedException ended) {
        status = 1;
      }
      Runtime.getRuntime().halt(status);
    }));
  }

  private static void die(String why) {
    System.err.println("driver: " + why);
    Runtime.getRuntime().halt(2);
  }

  private void parse(String[] words) throws IOException {
    for (int at = 2; at < words.length; at++) {
      if (!parseFlag(words[at])) {
        parseOption(words[at], at + 1 < words.length ? words[++at] : "");
      }
    }
    for (String id : ids) {
      if (models.containsKey(id)) {
        builder.inPlace(id, models.get(id));
      } else {
        builder.snapshots(id);
      }
    }
    if (!turnedDown.isEmpty() || !broken.isEmpty() || applySeconds > 0) {
      builder.beforeApply(beforeApply()).apply(apply());
    }
  }

  /** Handles an option without a value; returns false for any other option. */
  private boolean parseFlag(String option) {
    tensors &= !option.equals("--no-tensors");
    cast |= option.equals("--cast");
    switch (option) {
      case "--no-tensors":
        return true;
      case "--network":
        builder.networkOnly();
        return true;
      case "--partial":
        builder.partial();
        return true;
      case "--cast":
        builder.cast();
        return true;
      default:
        return false;
    }
  }

  private void parseOption(String option, String value) throws IOException {
    switch (option) {
      case "--name" -> builder.name(value);
      case "--keys" -> builder.keys(value);
      case "--models" -> ids.addAll(List.of(value.split(",")));
      case "--in-place" -> models.putAll(new Specification(Path.of(value)).read());
      case "--bytes-max" -> builder.bytesMax(Long.parseLong(value));
      case "--seconds" -> seconds = Double.parseDouble(value);
      case "--turn-down" -> turnedDown = numbers(value);
      case "--break" -> broken = numbers(value);
      case "--apply-seconds" -> takeApplySeconds(value.split(":"));
      case "--apply-timeout" -> builder.applyTimeout(duration(Double.parseDouble(value)));
      default -> die(USAGE);
    }
  }

  private void takeApplySeconds(String[] both) {
    applySeconds = Double.parseDouble(both[0]);
    if (both.length > 1) {
      slow = numbers(both[1]);
    }
  }

  private static Set<Long> numbers(String list) {
    return Stream.of(list.split(",")).map(Long::valueOf).collect(Collectors.toSet());
  }

  private static Duration duration(double seconds) {
    return Duration.ofMillis(Math.round(1000 * seconds));
  }

  // User functions.

  private Decide beforeApply() {
    return offer -> {
      if (models.containsKey(offer.model()) && turnedDown.contains(offer.version())) {
        throw new IllegalStateException("told to turn down");
      }
    };
  }

  private Decide apply() {
    return offer -> {
      if (slow.isEmpty() || slow.contains(offer.version())) {
        long end = System.nanoTime() + (long) (applySeconds * 1e9);
        while (!over && System.nanoTime() < end) {
          Thread.sleep(10);
        }
      }
      boolean inPlace = models.containsKey(offer.model());
      if (inPlace && broken.contains(offer.version())) {
        throw new IllegalStateException("told to break");
      }
      if (!inPlace && turnedDown.contains(offer.version())) {
        throw new IllegalStateException("told to turn down");
      }
    };
  }

  // Output.

  private static void hear(Event event) {
    switch (event.kind()) {
      case "joined" -> say(line("joined").add("epoch", event.epoch()));
      case "lost" -> say(line("lost"));
      case "refused" -> say(line("refused").add("code", event.code()).add("text", event.text()));
      case "rejected" ->
          say(line("failed")
                  .version(event.model(), event.epoch(), event.version())
                  .add("code", event.code())
                  .add("text", event.text()));
      default -> System.err.println(event);
    }
  }

  private static Line line(String event) {
    return new Line().add("event", event);
  }

  private static synchronized void say(Line line) {
    OUT.println(line);
    OUT.flush();
  }

  /** A JSON object. */
  private static final class Line {
    private final List<String> fields = new ArrayList<>();

    Line raw(String name, Object value) {
      fields.add(quoted(name) + ":" + value);
      return this;
    }

    Line add(String name, long value) {
      return raw(name, value);
    }

    Line add(String name, String value) {
      return raw(name, quoted(value));
    }

    Line version(String model, long epoch, long version) {
      return add("model", model).add("epoch", epoch).add("version", version);
    }

    Line metadata(Map<String, String> metadata) {
      Line said = new Line();
      metadata.forEach(said::add);
      return raw("metadata", said);
    }

    private static String quoted(String text) {
      StringBuilder made = new StringBuilder("\"");
      text.chars().forEach(c -> {
        if (c == '"' || c == '\\') {
          made.append('\\').append((char) c);
        } else if (c < 0x20) {
          made.append(String.format("\\u%04x", c));
        } else {
          made.append((char) c);
        }
      });
      return made.append('"').toString();
    }

    @Override
    public String toString() {
      return "{" + String.join(",", fields) + "}";
    }
  }

  // Following the publisher.

  private void follow() throws InterruptedException {
    long end = System.nanoTime() + (long) (seconds * 1e9);
    List<Thread> watching = new ArrayList<>();
    try (Worker worker = builder.connect()) {
      if (tensors && !cast) { // a cast changes the bytes
        models.forEach((id, model) -> watching.add(new Thread(() -> watch(id, model))));
      }
      watching.forEach(Thread::start);
      while (!over && System.nanoTime() < end) {
        next(worker);
      }
      over = true;
      for (Thread each : watching) {
          each.join();
        }
    }
  }

  private void next(Worker worker) {
    try {
      worker.receive(LOOK).ifPresentOrElse(this::reportApplied, () -> reportRunning(worker));
    } catch (WeightbusException thrown) {
      System.err.println(thrown.code() + ": " + thrown.getMessage()); // onEvent has reported it
    }
  }

  private void reportApplied(Update update) {
    Line line = line("applied").version(update.model(), update.epoch(), update.version());
    line.add("digest", update.digest());
    line.metadata(update.metadata());
    reported.put(update.model(), new State.Version(update.epoch(), update.version()));
    try (Snapshot snapshot = update.snapshot()) {
      if (tensors && snapshot != null) {
        line.raw("tensors", checksums(snapshot.tensors()));
      } else if (tensors) {
        try (Reading reading = models.get(update.model()).read()) {
          line.raw("tensors", checksums(reading.model().tensors()));
        }
      }
    }
    say(line);
  }

  /** Reports each running version that is not the one last reported for its model. */
  private void reportRunning(Worker worker) {
    for (String id : ids) {
      State state = worker.state(id);
      State.Version runs = state.running();
      if (runs != null && !runs.equals(reported.put(id, runs))) {
        say(line("runs").version(id, runs.epoch(), runs.version()).metadata(state.metadata()));
      }
    }
  }

  private static Line checksums(List<Tensor> tensors) {
    Line line = new Line();
    for (Tensor each : tensors) {
      line.add(each.name(), checksum(each));
    }
    return line;
  }

  /**
   * Returns the CRC-32C. Copies pieces, since bytes() would keep a snapshot until it is collected.
   */
  private static long checksum(Tensor tensor) {
    CRC32C crc = new CRC32C();
    ByteBuffer piece = ByteBuffer.allocate(PIECE);
    for (long at = 0; at < tensor.nbytes(); at += piece.limit()) {
      tensor.copyTo(piece.clear(), at);
      crc.update(piece.flip());
    }
    return crc.getValue();
  }

  /** Reads a model continuously, and checks that all bytes of a version are equal. */
  private static void watch(String id, Model model) {
    List<ByteBuffer> buffers = new ArrayList<>();
    model.tensors().forEach(each -> buffers.add(each.bytes()));
    buffers.removeIf(each -> each.capacity() == 0);
    while (!over) {
      try (Reading reading = model.read()) {
        if (isTorn(buffers)) {
          say(line("torn").add("model", id));
          over = true;
        }
      } catch (WeightbusException torn) {
        continue; // there is nothing to read
      } finally {
        LockSupport.parkNanos(100_000); // so that versions can be applied
      }
    }
  }

  private static boolean isTorn(List<ByteBuffer> buffers) {
    for (ByteBuffer each : buffers) {
      int rest = each.capacity() - 1;
      boolean same = each.get(0) == buffers.get(0).get(0);
      if (!same || !each.slice(0, rest).equals(each.slice(1, rest))) {
        return true;
      }
    }
    return false;
  }

  /**
   * Parses the memory to register: {"model": {"tensor": {"dtype": "F32", "shape": [4, 3]}}},
   * without escapes.
   */
  private static final class Specification {
    private final String json;
    private int at;

    Specification(Path path) throws IOException {
      json = Files.readString(path);
    }

    Map<String, Model> read() {
      Map<String, Model> models = new LinkedHashMap<>();
      items(id -> {
        List<Tensor> tensors = new ArrayList<>();
        items(name -> tensors.add(tensor(name)));
        models.put(id, Model.resident(tensors.toArray(Tensor[] ::new)));
      });
      return models;
    }

    private Tensor tensor(String name) {
      List<Long> shape = new ArrayList<>();
      StringBuilder dtype = new StringBuilder();
      items(key -> {
        if (key.equals("dtype")) {
          dtype.append(text());
          return;
        }
        next();
        for (at++; next() != ']';) {
          shape.add(number());
        }
        at++;
      });
      return Tensor.of(name, dtype.toString(), shape.stream().mapToLong(size -> size).toArray());
    }

    private void items(Consumer<String> item) {
      if (next() != '{') {
        die("no specification of tensors: " + json.substring(at));
      }
      for (at++; next() != '}';) {
        item.accept(text());
      }
      at++;
    }

    private String text() {
      if (next() != '"') {
        die("no specification of tensors: " + json.substring(at));
      }
      int begin = at + 1;
      at = json.indexOf('"', begin) + 1;
      return json.substring(begin, at - 1);
    }

    private long number() {
      int begin = at;
      while (Character.isDigit(json.charAt(at))) {
        at++;
      }
      return Long.parseLong(json.substring(begin, at));
    }

    private char next() {
      while (" \t\r\n,:".indexOf(json.charAt(at)) >= 0) {
        at++;
      }
      return json.charAt(at);
    }
  }
}
