import pytest

from timing import Spread, Timing, interleaved


def test_interleaved_rotates_the_order():
    calls = []
    times = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4, warmup=1, burst=1)
    assert "".join(calls) == "abc" + "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    assert [len(t.seconds) for t in times.values()] == [4, 4, 4]


def test_ratios_are_paired():
    slow, quick = Timing((2.0, 20.0, 6.0)), Timing((1.0, 10.0, 2.0))
    assert slow.over(quick) == Spread(median=2.0, lower=2.0, upper=2.5)
    assert Timing((0.5,)).milliseconds == Spread(500.0, 500.0, 500.0)


def test_interleaved_refuses_nonsense():
    with pytest.raises(ValueError, match="burst >= 1"):
        interleaved({"a": int}, rounds=0)
