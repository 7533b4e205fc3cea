"""Ways in which a Trainer's run ends that its callbacks are not told of; and callbacks that are copied after a run."""

import copy
import pickle

import pytest

from perfdoctor.doors import session as sessions

pl = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")
transformers = pytest.importorskip("transformers", reason="needs transformers")

import test_huggingface as trainers  # noqa: E402
from lightning_fits import ADVICE, fit  # noqa: E402
from test_huggingface import _no_device_of_another_test  # noqa: E402, F401 - a fixture for every test here

from perfdoctor.doors.huggingface import PerfDoctorTrainerCallback  # noqa: E402
from perfdoctor.doors.lightning import PerfDoctorCallback  # noqa: E402

pytestmark = [*(pytest.mark.filterwarnings(each) for each in (*ADVICE, "ignore:.*pin_memory"))]


class FailsAtTheEnd(pl.Callback):
    """Fails once more when it is told of an exception, so that no callback after it is told."""

    def on_exception(self, trainer, pl_module, exception):
        raise ArithmeticError("the handler's own")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_train_end", "on_validation_end"])
@pytest.mark.parametrize("every", [None, 20])
def test_everything_is_taken_back_where_another_callback_fails_at_an_exception(error, hook, every, tmp_path, capsys):
    class Failing(FailsAtTheEnd):
        calls = 0

    def fail(self, trainer, *args):
        self.calls += 1
        if self.calls > (12 if hook == "on_train_batch_end" else 0) and not trainer.sanity_checking:
            raise error("the user's own")

    setattr(Failing, hook, fail)
    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=every, report_dir=tmp_path)
    with pytest.raises(ArithmeticError, match="the handler's own"):
        fit(tmp_path, [Failing(), callback])  # looks at what is left hooked
    if hook == "on_train_batch_end":
        assert callback.report.step.num_steps == 3
        assert capsys.readouterr().out.count("perfdoctor: session on") == 1
    fit(tmp_path, [PerfDoctorCallback(warmup=2, active=3)])


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_epoch_end", "on_train_end"])
def test_everything_is_taken_back_where_another_callback_of_hugging_face_fails(event, error, is_last, tmp_path):
    class Failing(transformers.TrainerCallback):
        fails = True

    def fail(self, args, state, control, **kwargs):
        if self.fails:
            raise error("the user's own")

    setattr(Failing, event, fail)
    callback, failing = PerfDoctorTrainerCallback(warmup=2, active=3, every_n_steps=20), Failing()
    order = [callback, failing] if is_last else [failing, callback]
    trainer, _ = trainers.trainer_of(tmp_path, order, max_steps=14)
    before = trainers.hooked(trainer)
    with pytest.raises(error, match="the user's own"):
        trainer.train()
    assert sessions.running() is None
    parts = (4, 8) if event == "on_train_begin" else ()  # wrappers on that very trainer stay until it trains again
    assert [part for i, part in enumerate(trainers.hooked(trainer)) if i not in parts] == [
        part for i, part in enumerate(before) if i not in parts
    ]
    failing.fails = False
    trainer.train()
    assert trainers.hooked(trainer) == before
    assert callback.report.step.num_steps == 3


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
@pytest.mark.parametrize("every", [None, 12])
def test_a_callback_is_copied_after_a_fit(carry, every, tmp_path):
    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=every, treatments=("nan-watch",))
    fit(tmp_path, [callback])
    carried = carry(callback)
    assert isinstance(carried, pl.Callback)
    assert (carried.options, carried.treatments) == (callback.options, ("nan-watch",))
    assert carried.report is None  # it begins anew
    assert callback.report is not None
    fit(tmp_path, [carried])
    assert carried.report.step.num_steps == 3


def test_a_callback_of_hugging_face_is_copied_after_a_training(tmp_path):
    callback = PerfDoctorTrainerCallback(warmup=2, active=3, every_n_steps=20)
    trainers.train(tmp_path, [callback], max_steps=14)
    for carried in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert carried.report is None
        trainers.train(tmp_path, [carried], max_steps=14)
        assert carried.report.step.num_steps == 3
