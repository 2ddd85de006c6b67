package io.github.weightbus;

/**
 * Accepts or rejects each version, in the thread that calls {@link Worker#receive}. To accept it,
 * return; to reject it, throw: the exception's message is reported to the publisher.
 */
@FunctionalInterface
public interface Decide {
  void decide(Offer offer) throws Exception;
}
