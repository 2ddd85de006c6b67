/** Defines the errors of this package, one class for each reason. */

/** The base class of all errors of this package. */
export class WeightbusError extends Error {
  override get name(): string {
    return this.constructor.name;
  }
}

/** An address is invalid, or cannot be connected to. */
export class AddressError extends WeightbusError {}

/** Keys cannot be read or are invalid, or this build has no support for keys. */
export class KeysError extends WeightbusError {}

/**
 * A version cannot be applied. If `intact`, the previous version still runs; otherwise none does.
 */
export class ApplyError extends WeightbusError {
  constructor(
    readonly model: string,
    readonly epoch: number,
    readonly version: number,
    /** A code of section 13 of the protocol, such as `layout-mismatch`. */
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

/** An apply failed half-way: the memory holds no version until another version is applied. */
export class TornError extends WeightbusError {}

/** The publisher refused this worker, which keeps trying to join. */
export class RefusedError extends WeightbusError {
  constructor(
    readonly code: string,
    readonly reason: string,
    message: string,
  ) {
    super(message);
  }
}

/** The worker is closed and receives no more versions. */
export class ClosedError extends WeightbusError {}

/** A timeout passed: no publisher answered, or an apply did not end. */
export class TimeoutError extends WeightbusError {}

/** A message breaks the protocol and is dropped. Internal: never thrown to users. */
export class ProtocolError extends WeightbusError {
  constructor(
    message: string,
    readonly code: "malformed" | "protocol-version" = "malformed",
  ) {
    super(message);
  }
}

/** The bytes are not a valid layout. The text names the broken rule and where it is broken. */
export class LayoutError extends WeightbusError {}

/** The layout has more names than the limit allows. */
export class TooManyNamesError extends LayoutError {}

/** The bytes are not a valid patch for the base; the text gives the reason. */
export class PatchError extends WeightbusError {}
