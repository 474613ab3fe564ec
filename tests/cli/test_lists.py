import argparse
from pathlib import Path

import pytest

from codd.cli import cache, generate, lists, load, main
from codd.cli.lists import add_list, split


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_list(parser, "--data", Path, metavar="PATH", default=[Path("default")])
    add_list(parser, "--weights", float, metavar="W")
    return parser.parse_args(argv)


def test_values_have_commas_between_them_and_a_flag_given_again_adds_to_them():
    assert parsed("--data", "a,b c.txt", "--data=d").data == [Path("a"), Path("b c.txt"), Path("d")]
    assert parsed("--weights", "1, 2.5,").weights == [1.0, 2.5]


def test_what_is_given_takes_the_place_of_the_default_which_stays_as_it_is():
    assert parsed("--data", "a", "--data", "b").data == [Path("a"), Path("b")]
    assert (parsed().data, parsed().weights) == ([Path("default")], None)


def test_a_value_that_holds_a_comma_is_quoted():
    assert split('"a, b.txt",c') == ["a, b.txt", "c"]
    assert split('a"b') == ['a"b']


@pytest.mark.parametrize("text", ["", ",", " , ", '"a', "a\nb"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected values with commas between them, found"):
        split(text)


def test_a_wrong_value_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        parsed("--weights", "1,x")
    assert "argument --weights: invalid list of float value: '1,x'" in capsys.readouterr().err


def test_verbs_follow_the_rule():
    def read(verb, *argv: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        verb.configure(parser)
        return parser.parse_args(argv)

    args = read(cache, "--out=x", "--data=a,b", "--data=c", "--fields", "q,a", "--weights", "1,2", "--weights=3")
    assert (args.data, args.fields, args.weights) == ([Path("a"), Path("b"), Path("c")], ["q", "a"], [1.0, 2.0, 3.0])
    args = read(generate, "--ban", "3,5", "--ban", "7", "--stop", "a, b", "--stop", "c")
    assert (args.ban, args.stop) == ((3, 5, 7), ["a, b", "c"])
    args = read(load("eval"), "--out=x", "--tasks", "a,b", "--tasks", "c", "--threshold", "0.5,none")
    assert (args.tasks, args.circuit, args.threshold) == (["a", "b", "c"], ["trained"], [0.5, None])


def test_the_help_states_the_rule(capsys):
    assert main(["--help"]) == 0
    assert lists.ABOUT in capsys.readouterr().out
