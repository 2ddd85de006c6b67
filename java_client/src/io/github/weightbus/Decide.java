package io.github.weightbus;

/**
 * Decides on each version, in the thread that calls {@link Worker#receive}: to return takes it, to
 * throw turns it down, and the publisher is told the message.
 */
@FunctionalInterface
public interface Decide {
  void decide(Offer offer) throws Exception;
}
