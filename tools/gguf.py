"""GGUF files: a reader and a writer for the types that the small models use. numpy only."""
import struct

import numpy as np

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30                  # tensor types
FILE_TYPE = {F16: 1, Q8_0: 7}                                # general.file_type of a file whose matrices have this type
ALIGNMENT = 32


# ---- number formats: rows of 32 values share one f16 scale -----------------------------------------------------------

def to_q8_0(a):
    b = a.reshape(-1, 32).astype(np.float32)
    d = np.abs(b).max(1) / np.float32(127)
    q = b * np.divide(1, d, out=np.zeros_like(d), where=d > 0)[:, None]
    out = np.empty((len(b), 34), np.uint8)
    out[:, :2] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 2:] = (np.sign(q) * np.floor(np.abs(q) + np.float32(0.5))).astype(np.int8).view(np.uint8)
    return out.tobytes()


def to_q4_0(a):
    b = a.reshape(-1, 32).astype(np.float32)
    d = b[np.arange(len(b)), np.abs(b).argmax(1)] / np.float32(-8)
    q = b * np.divide(1, d, out=np.zeros_like(d), where=d != 0)[:, None]
    q = np.minimum(15, (q + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
    out = np.empty((len(b), 18), np.uint8)
    out[:, :2] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 2:] = q[:, :16] | q[:, 16:] << 4
    return out.tobytes()


def to_bf16(a):
    u = a.astype("<f4").view(np.uint32)
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype("<u2").tobytes()


def from_bytes(raw, kind, n):
    """n values of a tensor as float32"""
    if kind == F32:
        return np.frombuffer(raw, "<f4", n).copy()
    if kind == F16:
        return np.frombuffer(raw, "<f2", n).astype(np.float32)
    if kind == BF16:
        return (np.frombuffer(raw, "<u2", n).astype(np.uint32) << 16).view(np.float32)
    b = np.frombuffer(raw, np.uint8, n // 32 * (34 if kind == Q8_0 else 18)).reshape(n // 32, -1)
    d = b[:, :2].copy().view("<f2").astype(np.float32)
    q = b[:, 2:].view(np.int8) if kind == Q8_0 else np.concatenate((b[:, 2:] & 15, b[:, 2:] >> 4), 1).astype(np.int8) - 8
    return (d * q).reshape(-1)


TO = {F32: lambda a: a.astype("<f4").tobytes(), F16: lambda a: a.astype("<f2").tobytes(), BF16: to_bf16, Q4_0: to_q4_0,
      Q8_0: to_q8_0}


# ---- metadata --------------------------------------------------------------------------------------------------------

def text(t):
    b = t.encode("utf8")
    return struct.pack("<Q", len(b)) + b


class Keys:
    """Metadata in the order of the calls, which is the order in the file."""

    def __init__(self):
        self.n, self.data = 0, b""

    def put(self, key, kind, payload):
        self.data += text(key) + struct.pack("<I", kind) + payload
        self.n += 1

    def u32(self, key, v): self.put(key, 4, struct.pack("<I", v))
    def i32(self, key, v): self.put(key, 5, struct.pack("<i", v))
    def f32(self, key, v): self.put(key, 6, struct.pack("<f", v))
    def flag(self, key, v): self.put(key, 7, struct.pack("<?", v))
    def str(self, key, v): self.put(key, 8, text(v))
    def array(self, key, kind, n, payload): self.put(key, 9, struct.pack("<IQ", kind, n) + payload)
    def i32s(self, key, v): self.array(key, 5, len(v), struct.pack("<%di" % len(v), *v))
    def f32s(self, key, v): self.array(key, 6, len(v), struct.pack("<%df" % len(v), *v))
    def flags(self, key, v): self.array(key, 7, len(v), struct.pack("<%d?" % len(v), *v))
    def strs(self, key, v): self.array(key, 8, len(v), b"".join(map(text, v)))


# ---- files -----------------------------------------------------------------------------------------------------------

def write(path, keys, tensors, matrix_type, type_of):
    """tensors: {name: float32 array, rows first}. type_of(name, array, matrix_type) -> tensor type."""
    keys.u32("general.quantization_version", 2)
    keys.u32("general.file_type", FILE_TYPE[matrix_type])
    infos, blobs, offset = b"", [], 0
    for name, a in tensors.items():
        a = np.ascontiguousarray(a, np.float32)
        kind = type_of(name, a, matrix_type)
        if kind in (Q4_0, Q8_0):
            a = a.astype("<f2").astype(np.float32)         # as if quantized from the f16 file
        raw = TO[kind](a)
        infos += text(name) + struct.pack("<I%dQ" % a.ndim, a.ndim, *a.shape[::-1]) + struct.pack("<IQ", kind, offset)
        blobs.append(raw + bytes(-len(raw) % ALIGNMENT))
        offset += len(blobs[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), keys.n) + keys.data + infos
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % ALIGNMENT) + b"".join(blobs))
    return len(head) + -len(head) % ALIGNMENT + offset


def read(path):
    """-> ({key: value}, {name: float32 array, rows first}, {name: tensor type})"""
    f = open(path, "rb").read()
    at = 4

    def number(form):
        nonlocal at
        at += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, f, at - struct.calcsize("<" + form))[0]

    def string():
        nonlocal at
        n = number("Q")
        at += n
        return f[at - n:at].decode("utf8")

    def value(kind):
        if kind == 8:
            return string()
        if kind == 9:
            element, n = number("I"), number("Q")
            return [value(element) for _ in range(n)]
        return number({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])

    assert f[:4] == b"GGUF" and number("I") == 3, path
    n_tensors, n_keys = number("Q"), number("Q")
    keys, infos, tensors, kinds = {}, [], {}, {}
    for _ in range(n_keys):
        key = string()
        keys[key] = value(number("I"))
    for _ in range(n_tensors):
        name = string()
        infos.append((name, [number("Q") for _ in range(number("I"))], number("I"), number("Q")))
    start = at + -at % ALIGNMENT
    for name, ne, kind, offset in infos:
        tensors[name] = from_bytes(f[start + offset:], kind, int(np.prod(ne))).reshape(ne[::-1])
        kinds[name] = kind
    return keys, tensors, kinds
