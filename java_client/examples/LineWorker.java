import io.github.weightbus.Model;
import io.github.weightbus.Reading;
import io.github.weightbus.Tensor;
import io.github.weightbus.Update;
import io.github.weightbus.WeightbusException;
import io.github.weightbus.Worker;
import java.time.Duration;
import java.util.Locale;
import java.util.Optional;

/**
 * Predicts with the newest weights, and prints which version it runs: {@code build/worker
 * tcp://localhost:5555 --name w0 --patience 30}. It does the same as examples/numpy_worker.py;
 * examples/numpy_trainer.py publishes to both.
 */
final class LineWorker {
  public static void main(String[] words) throws InterruptedException {
    if (words.length % 2 == 0) {
      System.err.println("usage: worker ADDRESS[,ADDRESS...] [--name NAME] [--patience SECONDS]");
      System.exit(2);
    }
    Model line = Model.resident(Tensor.f32("slope", 3), Tensor.f32("offset"));
    Worker.Builder builder = Worker.builder(words[0]).inPlace("line", line);
    double patience = 30;
    for (int at = 1; at < words.length; at += 2) {
      switch (words[at]) {
        case "--name" -> builder.name(words[at + 1]);
        case "--patience" -> patience = Double.parseDouble(words[at + 1]);
        default -> throw new IllegalArgumentException(words[at]);
      }
    }
    Worker worker = builder.connect();
    // Also on SIGTERM: close() ends the wait in receive().
    Runtime.getRuntime().addShutdownHook(new Thread(worker::close));
    follow(worker, line, Duration.ofMillis((long) (1000 * patience)));
  }

  private static void follow(Worker worker, Model line, Duration patience) {
    while (true) {
      try {
        Optional<Update> update = worker.receive(patience);
        if (update.isEmpty()) {
          return;
        }
        print(worker.name(), update.get(), predict(line));
      } catch (WeightbusException wrong) { // the old version still runs
        System.err.println(wrong.code() + ": " + wrong.getMessage());
        if (wrong.code().equals("closed")) {
          return;
        }
      }
    }
  }

  /** At (1, 2, 3): about 4.5 when the fit is good. */
  private static double predict(Model line) {
    try (Reading reading = line.read()) { // the same version, whole, until it is closed
      float[] slope = line.tensor("slope").floats();
      return slope[0] + 2 * slope[1] + 3 * slope[2] + line.tensor("offset").floats()[0];
    }
  }

  private static void print(String name, Update update, double prediction) {
    System.out.printf(Locale.ROOT,
        "{\"worker\":\"%s\",\"version\":%d,\"prediction\":%.4f,\"digest\":\"%s\"}%n", name,
        update.version(), prediction, update.digest());
    System.out.flush();
  }
}
