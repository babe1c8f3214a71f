from hypothesis import given, strategies as st

from lockstep.keys import MASK, RandomStream, key, longer

parts = st.lists(st.integers(0, MASK), max_size=4)


def test_keys_never_change_between_versions():
    assert key() == 0
    assert key(0) == 0xE220A8397B1DCDAF
    assert key(1) == 0xE4D971771B652C20
    assert key(0, 0) == 0xA706DD2F4D197E6F
    assert key(7, RandomStream.SAMPLE, 2, 10**12) == 0xA6F8E01C966200F7
    assert [stream.value for stream in RandomStream] == [*range(1, 15)]


@given(parts, parts)
def test_different_parts_have_different_keys(a, b):
    assert (key(*a) == key(*b)) == (a == b)


@given(st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_a_key_has_64_bits_and_parts_count_modulo_two_to_the_64(values):
    assert 0 <= key(*values) <= MASK
    assert key(*values) == key(*(value % 2**64 for value in values))


@given(st.integers(0, MASK), st.integers(0, 63))
def test_one_bit_of_a_part_changes_about_half_of_the_key(part, bit):
    assert 8 <= (key(part) ^ key(part ^ 1 << bit)).bit_count() <= 56


@given(parts, st.integers(0, MASK))
def test_a_key_is_made_longer_by_one_part(some, last):
    assert longer(key(*some), last) == key(*some, last)


def test_a_key_is_an_output_of_the_published_splitmix64():
    golden = 0x9E3779B97F4A7C15
    outputs = [longer((1234567 + i * golden) & MASK, 0) for i in range(5)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
