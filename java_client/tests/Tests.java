package io.github.weightbus;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BooleanSupplier;
import java.util.stream.Stream;

/**
 * Tests the Java layer against a real publisher: ../c_client/tests/serve.py runs this class, and
 * publishes what the class requests on standard output. A version has "w" of a given shape and the
 * scalar "b"; all of its bytes are equal. Each case has models and workers of its own.
 */
final class Tests {
  private static final Duration LONG = Duration.ofSeconds(60); // on a busy machine
  private static final BufferedReader ANSWERS =
      new BufferedReader(new InputStreamReader(System.in));

  private static String address;
  private static boolean network; // without shared memory

  public static void main(String[] words) throws Exception {
    address = words[words.length - 1];
    network = words.length > 1;
    whatCannotBeIsSaid();
    theNextAddressIsTried();
    versionsAreWrittenInPlace();
    whatDoesNotFitIsTurnedDown();
    theUserDecides();
    offersAreForTheCall();
    snapshotsStayAsTheyAre();
    largeVersionsChangePlaces();
    aPartIsEnoughAndValuesAreConverted();
    smallFloatsAreWhatTheyMean();
    whatIsClosedIsSafe();
    whoeverWaitsLearnsOfTheEnd();
    functionsMayCloseOrThrow();
    nothingIsLeft();
    System.out.println("all well");
    System.exit(0);
  }

  // What cases are made with.

  private static void expect(boolean holds, String what) {
    if (!holds) {
      throw new AssertionError(what);
    }
  }

  private static void same(Object found, Object wanted) {
    expect(found.equals(wanted), found + " in place of " + wanted);
  }

  /** Expects an exception of a code, with these words in it. */
  private static WeightbusException fails(String code, String words, Runnable call) {
    try {
      call.run();
    } catch (WeightbusException thrown) {
      expect(thrown.code().equals(code) && thrown.getMessage().contains(words),
          thrown.code() + ", " + thrown.getMessage() + " in place of " + code + ", " + words);
      return thrown;
    }
    throw new AssertionError("no exception of " + code + ", " + words);
  }

  private static int ask(String what) {
    try {
      System.out.println(what);
      System.out.flush();
      return Integer.parseInt(ANSWERS.readLine());
    } catch (NumberFormatException done) {
      return 0; // "published"
    } catch (IOException wrong) {
      throw new AssertionError(wrong);
    }
  }

  private static void publish(String model, String shape, int fill) {
    ask("publish " + model + " " + shape + " " + fill);
  }

  private static void until(String what, BooleanSupplier holds) throws InterruptedException {
    long end = System.nanoTime() + LONG.toNanos();
    while (!holds.getAsBoolean()) {
      expect(System.nanoTime() < end, "never: " + what);
      TimeUnit.MILLISECONDS.sleep(5);
    }
  }

  private static ByteBuffer memory(int bytes) {
    return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
  }

  private static Model line() {
    return Model.resident(Tensor.f32("w", 4, 3), Tensor.f32("b"));
  }

  private static Worker.Builder builder(String name) {
    Worker.Builder builder = Worker.builder(address).name(name);
    return network ? builder.networkOnly() : builder;
  }

  private static Update next(Worker worker) {
    return worker.receive(LONG).orElseThrow(() -> new AssertionError("nothing came"));
  }

  private static boolean isAll(ByteBuffer bytes, int fill) {
    for (int at = 0; at < bytes.capacity(); at++) {
      if (bytes.get(at) != fill) {
        return false;
      }
    }
    return true;
  }

  // The cases.

  private static void whatCannotBeIsSaid() {
    fails("invalid", "F33", () -> Model.resident(Tensor.of("w", "F33")));
    fails("invalid", "5 bytes", () -> Model.of(Tensor.f32("w").in(memory(5))));
    fails("invalid", "0 bytes", () -> Model.of(Tensor.f32("w")));
    fails("invalid", "direct", () -> Tensor.f32("w").in(ByteBuffer.allocate(4)));
    fails("invalid", "direct", () -> Tensor.f32("w").in(memory(4).asReadOnlyBuffer()));
    fails("invalid", "no tensors", Model::resident);
    ByteBuffer f = memory(12);
    fails("invalid", "share a part of their memory",
        ()
            -> Model.of(Tensor.f32("a", 2).in(f.slice(0, 8).order(f.order())),
                Tensor.f32("b", 2).in(f.slice(4, 8).order(f.order()))));
    fails("system", "\"w\" of F32", () -> Model.resident(Tensor.f32("w", 1L << 50, 64)));
    fails("not-found", "w: F32[4, 3]", () -> line().tensor("nix"));
    fails("invalid", "tensor of the model", () -> Tensor.f32("w").bytes());
    fails("invalid", "0 models", () -> Worker.builder(address).connect());
    fails("invalid", "nowhere", () -> Worker.builder("nowhere").snapshots("m").connect());
    fails("invalid", "nowhere/w.json",
        () -> Worker.builder(address).snapshots("m").keys("nowhere/w.json").connect());
    fails("invalid", "\"name\" is missing",
        () -> Worker.builder(address).snapshots("m").keys("{}").connect());
    fails("invalid", "above zero", () -> Worker.builder(address).applyTimeout(Duration.ZERO));
    Model odd = Model.resident(Tensor.f32("a\0é", 2), Tensor.of("none", "I64", 0));
    same(odd.tensors().toString(), "[a\0é: F32[2], none: I64[0]]");
    same(odd.tensor("a\0é").nbytes(), 8L);
    same(odd.tensor("none").bytes().capacity(), 0);
  }

  private static void theNextAddressIsTried() {
    String nowhere = "tcp://127.0.0.1:1";
    try (Worker worker = Worker.builder(List.of(nowhere, address))
                             .name("falling-back")
                             .snapshots("fallback")
                             .connect()) {
      expect(worker.joined(LONG).isPresent(), "nobody lets it in");
      same(worker.address(), address);
      publish("fallback", "4x3", 1);
      same(next(worker).version(), 1L);
    }
    fails("invalid", "given twice",
        () -> Worker.builder(List.of(address, address)).snapshots("fallback").connect());
    fails("invalid", "no paths", () -> Worker.builder(address).keys(List.of()));
    fails("invalid", "nowhere/b.json",
        ()
            -> Worker.builder(List.of(nowhere, address))
                   .snapshots("fallback")
                   .keys(List.of("nowhere/b.json", "nowhere/c.json"))
                   .connect());
  }

  private static void versionsAreWrittenInPlace() throws InterruptedException {
    ByteBuffer w = memory(100).position(50).limit(98); // what remains counts
    ByteBuffer b = memory(4);
    // "head" is "w", and nobody publishes it.
    Model line = Model.of(
        Tensor.f32("w", 4, 3).in(w), Tensor.f32("b").in(b), Tensor.f32("head", 4, 3).in(w));
    var events = new LinkedBlockingQueue<Event>();
    try (Worker worker = builder("java").inPlace("place", line).onEvent(events::add).connect()) {
      System.gc(); // functions of ours are still there when they are called
      same(worker.name(), "java");
      long epoch = worker.joined(LONG).getAsLong();
      same(events.poll(60, TimeUnit.SECONDS), new Event("joined", "", epoch, 0, "", ""));
      same(ask("client java weightbus-java"), 1);
      expect(worker.receive(Duration.ZERO).isEmpty(), "a version of nobody");
      try (Reading reading = line.read()) {
        same(reading.version(), 0L);
      }
      for (int fill = 1; fill <= 3; fill++) {
        publish("place", "4x3", fill);
        Update update = next(worker);
        same(update.model(), "place");
        same(List.of(update.epoch(), update.version(), update.nbytes()),
            List.of(epoch, (long) fill, 52L));
        same(update.digest().length(), network ? 64 : 0);
        same(update.metadata(), Map.of("fill", "" + fill));
        expect(update.snapshot() == null && !update.took().isNegative(), update.toString());
        expect(isAll(b, fill) && isAll(w.slice(50, 48), fill) && w.get(49) == 0, "its bytes");
        same(line.tensor("w").bytes().order(), ByteOrder.nativeOrder());
      }
      try (Reading reading = line.read()) {
        same(List.of(reading.epoch(), reading.version()), List.of(epoch, 3L));
        publish("place", "4x3", 4);
        until("it is ready", () -> worker.state("place").ready() != null);
        expect(worker.receive(Duration.ofMillis(1)).isEmpty(), "applied while somebody reads");
        expect(isAll(b, 3), "what is read changes");
        CompletableFuture.runAsync(() -> fails("invalid", "thread", reading::close)).join();
        reading.close();
        reading.close();
      }
      same(next(worker).version(), 4L);
      State state = worker.state("place");
      same(state.running(), new State.Version(epoch, 4));
      same(state.metadata(), Map.of("fill", "4"));
      same(List.of(state.epoch(), state.malformed(), state.torn()), List.of(epoch, 0L, false));
      expect(worker.state().running() == null, "of no model");
      fails("invalid", "nix", () -> worker.state("nix"));
    }
  }

  private static void whatDoesNotFitIsTurnedDown() throws InterruptedException {
    Model line = line();
    var events = new LinkedBlockingQueue<Event>();
    try (Worker worker = builder("fit").inPlace("fit", line).onEvent(events::add).connect()) {
      publish("fit", "4x3", 1);
      next(worker);
      publish("fit", "3x4", 2);
      WeightbusException thrown =
          fails("layout-mismatch", "[3, 4] published, [4, 3] here", () -> worker.receive(LONG));
      same(List.of(thrown.model(), thrown.version()), List.of("fit", 2L));
      expect(isAll(line.tensor("w").bytes(), 1), "it has changed");
      Event event = events.take();
      while (!event.kind().equals("rejected")) {
        event = events.take();
      }
      same(List.of(event.model(), event.version(), event.code()),
          List.of("fit", 2L, "layout-mismatch"));
      expect(event.text().contains("[3, 4] published"), event.text());
    }
  }

  private static void theUserDecides() throws InterruptedException {
    Model line = line();
    List<Offer> before = new ArrayList<>();
    Decide early = offer -> {
      before.add(offer);
      if (offer.version() == 2) {
        throw new IllegalStateException("no version 2 hëre");
      }
    };
    Decide late = offer -> {
      expect(isAll(line.tensor("w").bytes(), (int) offer.version()), "it is there already");
      System.gc();
      if (offer.version() == 3) {
        throw new Exception();
      }
    };
    Worker.Builder builder = builder("decides").inPlace("decides", line);
    try (Worker worker = builder.beforeApply(early).apply(late).applyTimeout(LONG).connect()) {
      publish("decides", "4x3", 1);
      Update first = next(worker);
      same(before, List.of(new Offer("decides", first.epoch(), 1, 52, null)));
      publish("decides", "4x3", 2);
      fails("apply", "no version 2 hëre", () -> worker.receive(LONG));
      try (Reading reading = line.read()) {
        same(reading.version(), 1L);
      }
      publish("decides", "4x3", 3);
      fails("apply", "java.lang.Exception", () -> worker.receive(LONG));
      fails("torn", "", line::read);
      expect(worker.state("decides").torn(), "it is torn");
      publish("decides", "4x3", 4);
      same(next(worker).version(), 4L);
    }
  }

  private static void offersAreForTheCall() {
    AtomicReference<Tensor> kept = new AtomicReference<>();
    Decide copies = offer -> {
      Tensor w = offer.snapshot().find("w");
      same(List.of(offer.snapshot().version(), (long) offer.snapshot().tensors().size()),
          List.of(offer.version(), 2L));
      same(w.floats().length, 5);
      ByteBuffer copy = ByteBuffer.allocate(8);
      same(w.copyTo(copy, 16), 4);
      expect(copy.get(0) == 7 && copy.get(4) == 0, "the copy");
      fails("invalid", "only during this call", w::bytes);
      CompletableFuture.runAsync(() -> fails("invalid", "thread", w::floats)).join();
      kept.set(w);
    };
    try (Worker worker = builder("offers").snapshots("offers").apply(copies).connect()) {
      publish("offers", "5", 7);
      next(worker).snapshot().close();
      fails("closed", "closed", () -> kept.get().floats());
    }
  }

  private static void snapshotsStayAsTheyAre() {
    try (Worker worker = builder("free").snapshots("free").connect()) {
      expect(worker.latest("free").isEmpty(), "a version of nobody");
      publish("free", "5", 7);
      Snapshot first = next(worker).snapshot();
      publish("free", "2x2", 8);
      Snapshot second = next(worker).snapshot();
      same(List.of(first.model(), first.version(), second.version()), List.of("free", 1L, 2L));
      List<Tensor> tensors = first.tensors();
      same(Set.copyOf(tensors.stream().map(Tensor::toString).toList()),
          Set.of("w: F32[5]", "b: F32[]"));
      tensors.forEach(each -> expect(isAll(each.bytes(), 7), each.name()));
      Tensor w = second.find("w");
      same(List.of(w.nbytes(), w.shape()[1]), List.of(16L, 2L));
      expect(isAll(w.bytes(4, 8), 8) && w.bytes(4, 8).isReadOnly(), "a part");
      fails("invalid", "16 bytes", () -> w.bytes(12, 8));
      fails("invalid", "16 bytes", () -> w.bytes(Long.MAX_VALUE, 1));
      for (long offset : new long[] {17, 16 + (1L << 32), Long.MAX_VALUE, -1, Long.MIN_VALUE}) {
        fails("invalid", "16 bytes", () -> w.copyTo(memory(1), offset));
      }
      same(w.copyTo(memory(1), 16), 0);
      fails("not-found", "nix", () -> first.find("nix"));
      // A buffer, and what is made of it, is good for as long as it can be reached.
      FloatBuffer floats = w.bytes().asFloatBuffer();
      try (Snapshot latest = worker.latest("free").get()) {
        same(latest.version(), 2L);
      }
      second.close();
      second.close();
      fails("closed", "version 2 of \"free\" is closed", second::tensors);
      fails("closed", "", () -> second.find("w"));
      fails("closed", "", w::floats);
      for (int fill = 10; fill < 16; fill++) {
        publish("free", "2x2", fill);
        next(worker).snapshot().close();
        System.gc();
        expect(floats.get(3) == Float.intBitsToFloat(0x08080808), "its memory was used again");
      }
      first.close();
    }
  }

  private static void largeVersionsChangePlaces() {
    Model large = Model.resident(Tensor.f32("b"), Tensor.f32("w", 1024, 1024));
    ByteBuffer w = large.tensor("w").bytes();
    expect(w.capacity() == 4 << 20 && isAll(w, 0), "zeros at first");
    try (Worker worker = builder("large").inPlace("large", large).connect()) {
      for (int fill = 1; fill <= 3; fill++) {
        publish("large", "1024x1024", fill);
        next(worker);
        try (Reading reading = large.read()) {
          expect(isAll(w, fill) && isAll(reading.model().tensor("b").bytes(), fill), "bytes");
        }
      }
    }
    large = null;
    System.gc();
    expect(isAll(w, 3), "the memory is there as long as the buffer");
  }

  private static void aPartIsEnoughAndValuesAreConverted() {
    Model part = Model.resident(Tensor.of("w", "F64", 4));
    Worker.Builder builder = builder("wide").inPlace("wide", part);
    try (Worker worker = builder.partial().cast().anyDataHost().connect()) {
      publish("wide", "4", 64);
      same(next(worker).nbytes(), 20L);
      float value = Float.intBitsToFloat(0x40404040);
      same(part.tensor("w").bytes().asDoubleBuffer().get(3), (double) value);
      same(part.tensor("w").floats()[3], value);
    }
    Model small = Model.resident(Tensor.of("w", "I8", 4), Tensor.of("b", "F32"));
    fails("invalid", "I8", () -> small.tensor("w").floats());
  }

  private static void smallFloatsAreWhatTheyMean() {
    ByteBuffer bits = memory(16);
    bits.putShort((short) 0x3C01).putShort((short) 0xFC00).putShort((short) 0x0001); // F16
    bits.putShort((short) 0x7E00).putShort((short) 0x8000).putShort((short) 0x7BFF);
    float[] values = Tensor.of("h", "F16", 6).in(bits.flip()).floats();
    same(List.of(values[0], values[1], values[2], values[3], values[4], values[5]),
        List.of(1.0009765625f, Float.NEGATIVE_INFINITY, 0x1p-24f, Float.NaN, -0f, 65504f));
    bits.clear().put(0, (byte) 0x80).put(1, (byte) 0xBF); // BF16
    same(Tensor.of("b", "BF16", 1).in(bits.limit(2)).floats()[0], -1f);
    bits.clear().put(new byte[] {0x7E, 0x7F, 0x01, (byte) 0xB8}).flip();
    values = Tensor.of("e", "F8_E4M3", 4).in(bits).floats();
    same(List.of(values[0], values[1], values[2], values[3]),
        List.of(448f, Float.NaN, 0x1p-9f, -1f));
    values = Tensor.of("e", "F8_E5M2", 4).in(bits).floats();
    same(List.of(values[0], values[1], values[2], values[3]),
        List.of(Float.NaN, Float.NaN, 0x1p-16f, -0.5f));
  }

  private static void whatIsClosedIsSafe() {
    Model line = line();
    Worker worker = builder("closed").inPlace("closed", line).snapshots("shut").connect();
    worker.joined(LONG);
    publish("closed", "4x3", 9);
    next(worker);
    worker.close();
    worker.close();
    fails("closed", "worker \"closed\" is closed", () -> worker.receive(LONG));
    fails("closed", "", () -> worker.joined(LONG));
    fails("closed", "", worker::state);
    fails("closed", "", () -> worker.latest("shut"));
    same(worker.name(), "closed");
    try (Reading reading = line.read()) { // the model is still there
      expect(reading.version() == 1 && isAll(line.tensor("b").bytes(), 9), "what it held");
    }
  }

  private static void whoeverWaitsLearnsOfTheEnd() {
    for (int round = 0; round < 10; round++) {
      Worker worker = builder("waited-" + round).snapshots("waited").connect();
      var begun = new CompletableFuture<Void>();
      var waiting = CompletableFuture.runAsync(() -> {
        begun.complete(null);
        fails("closed", "close", () -> worker.receive(LONG));
      });
      begun.join();
      worker.close();
      waiting.join();
    }
  }

  private static void functionsMayCloseOrThrow() throws Exception {
    var box = new CompletableFuture<Worker>();
    var outcome = new CompletableFuture<String>();
    Worker listening =
        builder("hears")
            .snapshots("hears")
            .onEvent(event -> {
              try {
                box.join().close(); // in the thread that is to end
              } catch (WeightbusException thrown) {
                outcome.complete(thrown.code());
              }
              throw new IllegalStateException("on purpose: this is not to end anything");
            })
            .connect();
    box.complete(listening);
    same(outcome.get(60, TimeUnit.SECONDS), "invalid");
    publish("hears", "2", 1);
    next(listening).snapshot().close();
    listening.close();
    var other = new CompletableFuture<Worker>();
    Worker closing =
        builder("ends").snapshots("ends").apply(offer -> other.join().close()).connect();
    other.complete(closing);
    publish("ends", "2", 1);
    next(closing).snapshot().close(); // its version still counts
    fails("closed", "", () -> closing.receive(LONG));
  }

  private static void nothingIsLeft() throws Exception {
    for (int round = 0; round < 3; round++) {
      leave(round); // whatever stays once and for all
    }
    Set<String> before = held();
    for (int round = 3; round < 23; round++) {
      leave(round);
    }
    until("descriptors and threads are as before, but for " + before, () -> {
      System.gc(); // of those who were forgotten
      return held().size() <= before.size();
    });
    Set<Object> places = new HashSet<>();
    try (Worker worker = builder("places").snapshots("places").connect()) {
      for (int fill = 1; fill <= 30; fill++) {
        publish("places", "65536", fill);
        try (Snapshot snapshot = next(worker).snapshot()) {
          places.add(snapshot.find("w").place());
        }
      }
      expect(places.size() <= 4, "30 versions lie in " + places.size() + " places");
    }
  }

  /** Makes two workers, one of which is forgotten, and closes the other. */
  private static void leave(int round) {
    Worker.Builder builder = builder("left-" + round).inPlace("left", line());
    builder.onEvent(event -> {}).apply(offer -> {}).connect();
    try (Worker worker = builder("gone-" + round).snapshots("gone").connect()) {
      worker.joined(LONG);
    }
  }

  /** What this process holds of the library's. */
  private static Set<String> held() {
    try (Stream<Path> open = Files.list(Path.of("/proc/self/fd"));
         Stream<Path> tasks = Files.list(Path.of("/proc/self/task"))) {
      Set<String> held = new HashSet<>();
      open.forEach(path -> held.add("fd " + path.getFileName()));
      for (Path task : tasks.toList()) {
        String name = Files.readString(task.resolve("comm")).strip();
        if (name.startsWith("weightbus") || name.startsWith("ZMQ")) {
          held.add(name + " " + task.getFileName());
        }
      }
      return held;
    } catch (IOException ended) { // a thread, while we looked
      return held();
    }
  }
}
