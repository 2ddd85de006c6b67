package io.github.weightbus;

/**
 * Accepts or rejects each version, in the thread that calls {@link Worker#receive}: returning
 * accepts it, throwing rejects it, and the message is reported to the publisher.
 */
@FunctionalInterface
public interface Decide {
  void decide(Offer offer) throws Exception;
}
