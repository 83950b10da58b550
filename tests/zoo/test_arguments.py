import pytest

from zoo.cli import main, parser

ONE_TO_MOST = "a whole number from 1 to 1000000000"
NUMBER = "a number from 1e-09 to 1e+15"


@pytest.mark.parametrize(
    ("line", "option", "value", "expected"),
    [
        ("generate mnist --sweep-dir s", "--workers", str(10**12), "a whole number from 0 to 10000"),
        ("generate mnist --sweep-dir s", "--workers", "-1", "a whole number from 0 to 10000"),
        ("build s --out d", "--workers", str(10**12), "a whole number from 0 to 10000"),
        ("build s --out d", "--workers", "two", "a whole number from 0 to 10000"),
        ("bench mnist", "--runs", str(10**30), "a whole number from 1 to 10000"),
        ("bench mnist", "--runs", "0", "a whole number from 1 to 10000"),
        ("bench mnist", "--cores", "9" * 5000, ONE_TO_MOST),
        ("bench mnist --gpu-rate 1", "--gpus", str(10**400), ONE_TO_MOST),
        ("bench mnist --gpus 1", "--gpu-rate", "1e-320", NUMBER),
        ("bench mnist", "--seconds", "inf", NUMBER),
        ("plan mnist", "--rate", "1e-320", NUMBER),
        ("plan mnist", "--rate", "nan", NUMBER),
        ("evaluate d", "--limit", "0", ONE_TO_MOST),
        ("evaluate d", "--tolerance", str(10**30), "a whole number from 0 to 1000000000"),
    ],
)
def test_an_absurd_number_is_one_line(
    line: str, option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), f"{option}={value}"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"zoo {line.split()[0]}: error: argument {option}: found {value!r}, expected {expected}"


@pytest.mark.parametrize(
    ("option", "value", "expected"), [("--runs", "10000", 10_000), ("--runs", "1", 1), ("--seconds", "1e-9", 1e-9)]
)
def test_the_bounds_themselves_fit(option: str, value: str, expected: float) -> None:
    assert getattr(parser().parse_args(["bench", "mnist", option, value]), option[2:]) == expected


@pytest.mark.parametrize("rate", ["1e-9", "1e15"])
def test_a_forecast_at_the_bounds(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mnist", "--rate", rate]) == 0
    assert "\ntime " in capsys.readouterr().out
