import struct

import gguf_writer
import numpy as np
import pytest
from gguf_writer import F16, F32, Q4_1, Q8_0, Stored

from whet.errors import ConfigError
from whet.policies.gguf import parse

ONE = {"w": gguf_writer.plain(np.arange(6.0).reshape(2, 3))}


def weights(tensor: Stored) -> list[list[float]]:
    return parse(gguf_writer.gguf({}, {"w": tensor})).weights("w").tolist()


def test_metadata_comes_back_with_its_types() -> None:
    values = {"name": "Élan", "width": 576, "eps": 0.5, "flag": True, "ids": [3, 1], "words": ["a"]}
    file = parse(gguf_writer.gguf(values, {}))
    assert file.metadata == values
    assert file.text("name") == "Élan"
    assert file.integer("width") == 576
    assert file.number("eps") == 0.5
    assert file.integers("ids") == [3, 1]
    assert file.texts("words") == ["a"]


def test_every_number_type_of_metadata_is_read() -> None:
    numbers = {"B": 200, "b": -5, "H": 60000, "h": -600, "I": 1 << 31, "i": -70000, "f": 0.5}
    codes = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "Q": 10, "q": 11, "d": 12}
    numbers |= {"Q": 1 << 63, "q": -(1 << 62), "d": 0.1}
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(numbers))
    for form, number in numbers.items():
        data += gguf_writer.string(form) + struct.pack("<I", codes[form])
        data += struct.pack(f"<{form}", number)
    assert parse(data).metadata == numbers


def test_f32_is_read_in_numpys_order_of_dimensions() -> None:
    assert weights(ONE["w"]) == [[0, 1, 2], [3, 4, 5]]


def test_f16_is_widened() -> None:
    stored = Stored((1, 4), F16, struct.pack("<4e", 1.5, -2.0, 0.0, 1 / 1024))
    assert weights(stored) == [[1.5, -2.0, 0.0, 1 / 1024]]


def test_q8_0_is_scale_times_integer() -> None:
    first = struct.pack("<e32b", 0.5, *range(-16, 16))
    second = struct.pack("<e32b", -2.0, *[127, -128] * 16)
    stored = Stored((2, 32), Q8_0, first + second)
    assert weights(stored) == [[n / 2 for n in range(-16, 16)], [-254.0, 256.0] * 16]


def test_q4_1_is_scale_times_nibble_plus_least_with_the_low_nibbles_first() -> None:
    # Byte n holds n as number n of the block, and 15 - n as number 16 + n.
    nibbles = bytes(n | (15 - n) << 4 for n in range(16))
    stored = Stored((1, 32), Q4_1, struct.pack("<ee", 0.25, -1.0) + nibbles)
    expected = [n / 4 - 1 for n in [*range(16), *range(15, -1, -1)]]
    assert weights(stored) == [expected]


def test_tensors_start_where_the_files_alignment_says() -> None:
    values = {"general.alignment": 32, "padding": "x" * 7}
    tensors = {"a": gguf_writer.plain(np.ones((1, 3))), **ONE}
    file = parse(gguf_writer.gguf(values, tensors))
    assert file.weights("a").tolist() == [[1, 1, 1]]
    assert file.weights("w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_file_cut_short_anywhere_is_refused() -> None:
    whole = gguf_writer.gguf({"name": "x", "ids": [1, 2], "words": ["a", "b"]}, ONE)
    end = len(whole) - 8  # the last tensor has 24 bytes of 32
    assert parse(whole[:end]).weights("w").shape == (2, 3)
    for size in range(4, end):
        with pytest.raises(ConfigError, match="cut short"):
            parse(whole[:size])


def test_a_length_that_cannot_be_is_refused_without_being_read() -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_writer.string("k")
    for rest in (struct.pack("<IQ", 8, 1 << 62), struct.pack("<IIQ", 9, 4, 1 << 62)):
        with pytest.raises(ConfigError, match="cut short"):
            parse(header + rest)


def test_another_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not a GGUF file.*b'PK"):
        parse(b"PK\x03\x04 and so on")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        parse(b"")


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 1 cannot be read"):
        parse(gguf_writer.gguf({}, ONE, version=1))


def test_an_unknown_tensor_type_is_named() -> None:
    stored = Stored((1, 32), 12, bytes(144))
    with pytest.raises(ConfigError, match="'w' has type 12, expected one of F32, F16, Q4_1, Q8_0"):
        parse(gguf_writer.gguf({}, {"w": stored}))


def test_an_unknown_metadata_type_is_named() -> None:
    nested = struct.pack("<II", 9, 9) + bytes(8)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_writer.string("k") + nested
    with pytest.raises(ConfigError, match="'k' has a value of type 9"):
        parse(data)


def test_quantised_rows_are_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        parse(gguf_writer.gguf({}, {"w": Stored((32, 16), Q8_0, bytes(544))}))
    with pytest.raises(ConfigError, match="damaged"):
        parse(gguf_writer.gguf({}, {"w": Stored((), F32, bytes(4))}))


def test_a_damaged_header_is_refused() -> None:
    with pytest.raises(ConfigError, match="alignment is 0"):
        parse(gguf_writer.gguf({"general.alignment": 0}, ONE))
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse(gguf_writer.gguf({"name": "xyz"}, {}).replace(b"xyz", b"\xff\xfe\xfd"))
    twice = gguf_writer.gguf({}, {"aa": ONE["w"], "bb": ONE["w"]}).replace(b"bb", b"aa")
    with pytest.raises(ConfigError, match="same name"):
        parse(twice)


def test_what_is_missing_or_of_another_type_is_named() -> None:
    file = parse(gguf_writer.gguf({"name": "x", "ids": [1]}, ONE))
    with pytest.raises(ConfigError, match="'width': expected int, found nothing"):
        file.integer("width")
    with pytest.raises(ConfigError, match="'name': expected float, found str"):
        file.number("name")
    with pytest.raises(ConfigError, match="'name': expected list, found str"):
        file.texts("name")
    with pytest.raises(ConfigError, match="'ids': expected str, found int"):
        file.texts("ids")
    with pytest.raises(ConfigError, match="no tensor 'v'"):
        file.weights("v")
