/** What can go wrong, for programs: each class is one reason, each text says what to do next. */

/** Any error of this package. */
export class WeightbusError extends Error {
  override get name(): string {
    return this.constructor.name;
  }
}

/** An address that cannot be connected to. */
export class AddressError extends WeightbusError {}

/** Keys cannot be read or make no sense, or this machine has no use for them. */
export class KeysError extends WeightbusError {}

/** A version cannot be applied here. If `intact`, the one that ran before still runs, else none. */
export class ApplyError extends WeightbusError {
  constructor(
    readonly model: string,
    readonly epoch: number,
    readonly version: number,
    /** One of the codes of section 13 of the protocol, such as `layout-mismatch`. */
    readonly code: string,
    readonly reason: string,
    readonly intact = true,
  ) {
    super(
      `${model} version ${version} cannot be applied here (${code}): ${reason}` +
        (intact ? "" : "; the model holds parts of it, and runs no version until one is applied"),
    );
  }
}

/** An apply failed half-way: the memory holds no version until another one is applied. */
export class TornError extends WeightbusError {}

/** The publisher does not let this worker in; the worker goes on asking. */
export class RefusedError extends WeightbusError {
  constructor(
    readonly code: string,
    readonly reason: string,
    message: string,
  ) {
    super(message);
  }
}

/** The worker is closed, and nothing will come any more. */
export class ClosedError extends WeightbusError {}

/** The publisher did not answer in time. */
export class TimeoutError extends WeightbusError {}

/** The other side broke the protocol: the message is dropped. Never leaves the package. */
export class ProtocolError extends WeightbusError {
  constructor(
    message: string,
    readonly code: "malformed" | "protocol-version" = "malformed",
  ) {
    super(message);
  }
}

/** The bytes are no layout: which rule they break, and where. */
export class LayoutError extends WeightbusError {}

/** The layout has more names than there may be. */
export class TooManyNamesError extends LayoutError {}

/** The bytes are no patch for the version that is here, and why. */
export class PatchError extends WeightbusError {}
