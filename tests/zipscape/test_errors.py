from zipscape import errors


def test_message_has_all_parts_in_order():
    text = errors.describe("The thing failed", got=3, expected="an even number", where="rank 1", todo="use 4")
    assert text == "The thing failed. Got: 3. Expected: an even number. Where: rank 1. What to do: use 4."


def test_absent_parts_are_left_out_and_false_values_are_not():
    assert errors.describe("It failed!", got=0) == "It failed! Got: 0."


def test_an_unknown_field_comes_with_what_was_meant():
    assert errors.unknown_field("a.densty", ("lr", "density")) == "a.densty: unknown field (known: lr, density), did you mean density?"
    assert errors.unknown_field("x", ("lr", "density")) == "x: unknown field (known: lr, density)"


def test_kinds_are_caught_by_their_standard_base():
    assert issubclass(errors.ConfigError, ValueError) and issubclass(errors.ConfigError, errors.ZipScapeError)
    assert issubclass(errors.HandshakeError, RuntimeError) and issubclass(errors.BuildError, RuntimeError)
