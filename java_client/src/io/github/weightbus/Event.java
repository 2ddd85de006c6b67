package io.github.weightbus;

/**
 * An event of a worker, for logs and screens.
 *
 * @param kind "joined", "lost", "refused", "rejected", "changed-over" or "notice"; more kinds may
 *     be added
 * @param model "" (and 0 as epoch and version) if the event is not about a version
 * @param code a code of the protocol, such as "layout-mismatch", or ""
 */
public record Event(String kind, String model, long epoch, long version, String code, String text) {
}
