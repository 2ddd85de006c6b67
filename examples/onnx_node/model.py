"""Write policy.onnx: Linear(4, 8), Tanh, Linear(8, 2), with all weights as inputs.

python model.py

An exporter could write such a file, too. This script needs no library, since ONNX is protobuf.
"""

from pathlib import Path

STATE = {"state": (1, 4)}
WEIGHTS = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
SCORES = {"scores": (1, 2)}
FLOAT, INT = 1, 2  # ONNX's numbers of a type of tensors, and of a type of attributes


def varint(number: int) -> bytes:
    """Return a number in protobuf's encoding, with seven bits in each byte."""
    rest, low = number >> 7, number & 127
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Return a protobuf message; each field is a number and a value."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def node(operator: str, inputs: list[str], output: str, *attributes: bytes) -> bytes:
    """Return a NodeProto."""
    named = [(1, name) for name in inputs]
    return message(*named, (2, output), (4, operator), *((5, one) for one in attributes))


def floats(name: str, shape: tuple[int, ...]) -> bytes:
    """Return the ValueInfoProto of a tensor."""
    sizes = message(*((1, message((1, size))) for size in shape))
    return message((1, name), (2, message((1, message((1, FLOAT), (2, sizes))))))


def model() -> bytes:
    """Return the ModelProto."""
    transposed = message((1, "transB"), (3, 1), (20, INT))  # torch's matrices are transposed
    nodes = [
        node("Gemm", ["state", "0.weight", "0.bias"], "before", transposed),
        node("Tanh", ["before"], "hidden"),
        node("Gemm", ["hidden", "2.weight", "2.bias"], "scores", transposed),
    ]
    inputs = [floats(*one) for one in (STATE | WEIGHTS).items()]
    outputs = [floats(*one) for one in SCORES.items()]
    graph = message(
        *((1, one) for one in nodes),
        (2, "policy"),
        *((11, one) for one in inputs),
        *((12, one) for one in outputs),
    )
    opset = message((1, ""), (2, 17))
    return message((1, 9), (7, graph), (8, opset))


if __name__ == "__main__":
    (Path(__file__).parent / "policy.onnx").write_bytes(model())
