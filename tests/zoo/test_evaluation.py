"""Published checkpoints, measured and trained again from nothing but the dataset and its data."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_tools import change_index, top
from release_tools import Release, state_dict
from sweep_tools import TEST, block, tiny, write_digits

from generators.architecture import SmallTransformer
from generators.tasks import AGNewsSource, MNISTSource
from generators.tasks.data import TaskData, scale
from zoo.builder import build
from zoo.dataset import open_zoo
from zoo.errors import DatasetError
from zoo.evaluation import evaluate, rerun
from zoo.release import import_release
from zoo.sweep import generate

pytest_plugins = ["evaluation_fixtures"]


# Evaluation


def test_the_engine_and_machine_of_the_training_give_every_accuracy_exactly(
    tiny_dataset: Path, digits_dir: Path, engine_here: str
) -> None:
    report = evaluate(tiny_dataset, "mnist", digits_dir, tolerance=0, progress=False)
    assert (report.available, len(report.comparisons), report.identical, report.disagreeing) == (16, 16, 16, [])
    assert {c.checkpoint_id for c in report.comparisons} == set(
        open_zoo(tiny_dataset).checkpoints("mnist").metadata["checkpoint_id"].to_pylist()
    )
    assert report.worst_loss < 1e-12
    assert (report.engine, report.recorded_engines, report.test_samples) == (engine_here, [engine_here], TEST)
    assert report.data == f"data digest {top(tiny_dataset)['data_digest']} as recorded"
    lines = report.text().splitlines()
    assert [line.split()[0] for line in lines if line[0].isdigit() or line.startswith("best")] == [
        "0",
        "2",
        "4",
        "best",
    ]


def test_the_other_engine_agrees_within_two_examples(tiny_dataset: Path, digits_dir: Path) -> None:
    report = evaluate(tiny_dataset, None, digits_dir, engine="torch", progress=False)
    assert report.engine == "torch"
    assert (len(report.comparisons), report.disagreeing) == (16, [])


def test_a_checkpoints_measurement_is_its_models(tiny_dataset: Path, digits_dir: Path) -> None:
    report = evaluate(tiny_dataset, "mnist", digits_dir, progress=False)
    chosen = open_zoo(tiny_dataset).checkpoints("mnist")
    test = MNISTSource().load(digits_dir).test
    for comparison, model in zip(report.comparisons, chosen.models(), strict=True):
        logits = model(scale(test.inputs))
        assert (logits.argmax(1) == test.labels).double().mean().item() == comparison.accuracy
        loss = torch.nn.functional.cross_entropy(logits, test.labels).item()
        assert loss == pytest.approx(comparison.loss, rel=1e-5)


@pytest.mark.parametrize(("examples", "tolerance", "disagrees"), [(2, 2, False), (3, 2, True), (1, 0, True)])
def test_an_accuracy_may_differ_by_the_tolerance_and_no_more(
    tiny_copy: Path, digits_dir: Path, examples: int, tolerance: int, disagrees: bool
) -> None:
    changed = top(tiny_copy)["checkpoint_id"]
    change_index(tiny_copy, lambda row: row.update(test_accuracy=row["test_accuracy"] - examples / TEST))
    report = evaluate(tiny_copy, "mnist", digits_dir, tolerance=tolerance, progress=False)
    assert [c.checkpoint_id for c in report.disagreeing] == ([changed] if disagrees else [])
    assert (report.worst_examples, report.identical) == (examples, 15)
    assert json.loads(report.to_json())["worst_examples"] == examples


@pytest.mark.parametrize(("shift", "disagrees"), [(5e-4, False), (2e-3, True), (float("nan"), True)])
def test_a_loss_may_differ_by_rounding_and_no_more(
    tiny_copy: Path, digits_dir: Path, shift: float, disagrees: bool
) -> None:
    changed = top(tiny_copy)["checkpoint_id"]
    change_index(tiny_copy, lambda row: row.update(test_loss=row["test_loss"] + shift * max(row["test_loss"], 1.0)))
    report = evaluate(tiny_copy, "mnist", digits_dir, tolerance=0, progress=False)
    assert [c.checkpoint_id for c in report.disagreeing] == ([changed] if disagrees else [])
    assert report.identical == 16


def test_a_limit_takes_checkpoints_from_the_whole_range(tiny_dataset: Path, digits_dir: Path) -> None:
    report = evaluate(tiny_dataset, "mnist", digits_dir, limit=4, progress=False)
    ids = open_zoo(tiny_dataset).checkpoints("mnist").metadata["checkpoint_id"].to_pylist()
    assert [c.checkpoint_id for c in report.comparisons] == [ids[0], ids[5], ids[10], ids[15]]
    assert report.available == 16
    assert "not evaluated: 12: limit 4" in report.text()
    assert len(evaluate(tiny_dataset, "mnist", digits_dir, limit=99, progress=False).comparisons) == 16


def test_filters_choose_what_is_evaluated(tiny_dataset: Path, digits_dir: Path) -> None:
    report = evaluate(tiny_dataset, "mnist", digits_dir, filters=[("epoch_label", "==", "best")], progress=False)
    assert [c.label for c in report.comparisons] == ["best"] * 4
    assert (report.available, report.not_evaluated) == (4, "")
    with pytest.raises(DatasetError, match="filters: found no checkpoint"):
        evaluate(tiny_dataset, "mnist", digits_dir, filters=[("epoch", "==", 7)], progress=False)


def test_a_limit_of_none_is_no_check(tiny_dataset: Path, digits_dir: Path) -> None:
    with pytest.raises(DatasetError, match="limit: found 0, expected 1 or more"):
        evaluate(tiny_dataset, "mnist", digits_dir, limit=0, progress=False)


def test_the_text_has_a_line_a_label_and_names_what_disagrees(tiny_copy: Path, digits_dir: Path) -> None:
    changed = top(tiny_copy)
    change_index(tiny_copy, lambda row: row.update(test_accuracy=0.0))
    lines = evaluate(tiny_copy, "mnist", digits_dir, progress=False).text().splitlines()
    assert lines[0].startswith(f"mnist: 16 of 16 checkpoints evaluated on {TEST} test samples with engine ")
    counts = {line.split()[0]: line.split()[1:3] for line in lines[2:6]}
    assert counts == {
        label: ["4", "3" if label == changed["epoch_label"] else "4"] for label in ("0", "2", "4", "best")
    }
    assert lines[6] == "disagreeing (more than 2 examples, or loss): 1"
    assert lines[7].startswith(
        f"  {changed['checkpoint_id']}: accuracy {changed['test_accuracy']:.4f}, recorded 0.0000"
    )


def test_other_data_is_refused_before_anything_is_measured(
    tiny_dataset: Path, digits_dir: Path, tmp_path: Path
) -> None:
    write_digits(tmp_path)
    labels = np.zeros(TEST, np.uint8)
    header = (tmp_path / "t10k-labels-idx1-ubyte.gz").read_bytes()
    assert header == (digits_dir / "t10k-labels-idx1-ubyte.gz").read_bytes()
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    content = bytes([0, 0, 8, 1]) + TEST.to_bytes(4, "big") + labels.tobytes()
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(DatasetError, match=f"data_digest: found .*, expected {top(tiny_dataset)['data_digest']}"):
        evaluate(tiny_dataset, "mnist", tmp_path, progress=False)
    with pytest.raises(DatasetError, match="data_digest: found"):
        rerun(tiny_dataset, top(tiny_dataset)["run_id"], tmp_path, progress=False)


def test_other_data_without_a_folder_is_called_that(
    tiny_dataset: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = MNISTSource.load

    def other(source: MNISTSource, folder: Path | None) -> TaskData:
        data = load(source, digits_dir)
        return replace(data, test=data.train)

    monkeypatch.setattr(MNISTSource, "load", other)
    with pytest.raises(DatasetError, match=r"^no --data-dir: data_digest: found"):
        evaluate(tiny_dataset, "mnist", progress=False)


def test_folders_may_be_texts(tiny_dataset: Path, digits_dir: Path) -> None:
    assert len(evaluate(str(tiny_dataset), "mnist", str(digits_dir), limit=1, progress=False).comparisons) == 1
    assert rerun(str(tiny_dataset), top(tiny_dataset)["run_id"], str(digits_dir), progress=False).identical


def test_a_dataset_without_plans_says_so(tiny_copy: Path, digits_dir: Path) -> None:
    (tiny_copy / "provenance.json").write_text('{"data": {}}')
    with pytest.raises(DatasetError, match=r"provenance.json: plans: found none, expected an object"):
        evaluate(tiny_copy, "mnist", digits_dir, progress=False)


def test_a_plan_that_is_gone_or_no_text_is_one_line(tiny_copy: Path, digits_dir: Path) -> None:
    (plan,) = (tiny_copy / "plans").iterdir()
    plan.write_bytes(b"\xff")
    with pytest.raises(DatasetError, match=rf"{plan.name}: not readable \(UnicodeDecodeError\(.*expected a plan"):
        evaluate(tiny_copy, "mnist", digits_dir, progress=False)
    plan.unlink()
    with pytest.raises(DatasetError, match=rf"{plan.name}: not readable \(FileNotFoundError\(.*expected a plan"):
        rerun(tiny_copy, top(tiny_copy)["run_id"], digits_dir, progress=False)


# Texts


@pytest.fixture(scope="module")
def texts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AG News files of 96 + 40 texts, each class with words of its own."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(3)
    for split, count in (("train", 96), ("test", 40)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["Class Index", "Title", "Description"])
            for label in generator.integers(0, 4, count):
                words = generator.integers(0, 12, generator.integers(3, 12)) + 8 * label
                writer.writerow([label + 1, "title", " ".join(f"w{word}" for word in words)])
    return folder


@pytest.fixture(scope="module")
def text_dataset(texts_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ag_news")
    config = tiny(
        task="ag_news",
        engine="torch",
        data={"source": "csv", "max_tokens": 16, "vectors": "corpus", "vector_epochs": 2},
        grid=[block(learning_rate=[1e-2], dropout=[0.1])],
    )
    generate(config, folder / "sweep", texts_dir, workers=0, progress=False)
    build([folder / "sweep"], folder / "dataset", progress=False)
    return folder / "dataset"


@pytest.fixture
def no_training_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word vectors come from the dataset: trained anew they would be others on another machine."""
    monkeypatch.delattr(AGNewsSource, "_word_vectors")


@pytest.mark.usefixtures("no_training_of_vectors")
def test_texts_are_evaluated_with_the_embedding_of_the_dataset(text_dataset: Path, texts_dir: Path) -> None:
    report = evaluate(text_dataset, "ag_news", texts_dir, engine="torch", tolerance=0, progress=False)
    assert (len(report.comparisons), report.identical, report.disagreeing) == (4, 4, [])


@pytest.mark.usefixtures("no_training_of_vectors")
def test_a_run_on_texts_is_trained_again_bit_by_bit(text_dataset: Path, texts_dir: Path) -> None:
    run_id = open_zoo(text_dataset).index["run_id"][0].as_py()
    assert rerun(text_dataset, run_id, texts_dir, progress=False).identical


# Imported checkpoints


def imported(release: Release, folder: Path) -> Path:
    import_release(release.write_zip(folder / "release.zip"), release.task, folder / "imported", progress=False)
    build([folder / "imported"], folder / "dataset", progress=False)
    return folder / "dataset"


def test_imported_texts_have_no_embedding_and_the_report_says_so(tmp_path: Path) -> None:
    release = Release("ag_news")
    for label in ("50", "75"):
        release.add("a", label, 0.5)
    report = evaluate(imported(release, tmp_path), "ag_news", progress=False)
    assert (report.available, report.comparisons) == (2, [])
    assert "not evaluated: 2: imported AG News checkpoints come without the embedding" in report.text()


@pytest.fixture(scope="module")
def real_mnist(test_data: Path) -> TaskData:
    return MNISTSource().load(test_data / "mnist")


def test_imported_images_are_evaluated_on_mnists_test_set(
    test_data: Path, real_mnist: TaskData, tmp_path: Path
) -> None:
    release = Release()
    images = scale(real_mnist.test.inputs)
    for number, (label, lie) in enumerate((("50", 0.0), ("100", 0.01))):
        model = SmallTransformer("mnist").eval()
        model.load_state_dict(state_dict("mnist", number))
        with torch.no_grad():
            answers = torch.cat([model(part).argmax(1) for part in images.split(500)])
        accuracy = (answers == real_mnist.test.labels).double().mean().item()
        release.add("a", label, int((accuracy + lie) * 10_000) / 10_000)
    report = evaluate(imported(release, tmp_path), "mnist", test_data / "mnist", progress=False)
    assert [c.label for c in report.disagreeing] == ["100"]
    assert all(c.examples <= 1 and c.recorded_loss is None for c in report.comparisons if c.label != "100")
    assert report.data == "imported: the data of the training is not recorded"
    assert "recorded nothing" in report.text()


def test_imported_images_are_not_measured_on_other_images(digits_dir: Path, tmp_path: Path) -> None:
    release = Release()
    release.add("a")
    tiny_dataset = imported(release, tmp_path)
    with pytest.raises(DatasetError, match=f"found {TEST} test images, expected the 10000 of MNIST"):
        evaluate(tiny_dataset, "mnist", digits_dir, progress=False)
    run_id = top(tiny_dataset)["run_id"]
    with pytest.raises(DatasetError, match="origin: found imported, expected generated"):
        rerun(tiny_dataset, run_id, digits_dir, progress=False)
