import json
import os

import numpy as np
import pytest
import torch

from steady import UserError
from steady.dataloader import (
    DataLoader,
    DataSet,
    TokenFile,
    eval_batches,
    read_meta,
)
from steady.distributed import Process
from steady.shuffle import permute, scramble


def write(path, ids, dtype="uint16"):
    np.asarray(ids, dtype=dtype).tofile(path)
    return path


def loader(path, block_size=8, batch_size=2, accumulation=4, seed=1, **more):
    file = TokenFile(path, block_size, vocab_size=2**16)
    return DataLoader(file, batch_size, accumulation, seed, **more)


def first_tokens(loader, steps, first=0):
    """The first token of every sequence of `steps` steps, one sorted list per step."""
    batches = loader.micro_batches(first)
    per_step = loader.accumulation // loader.process.world_size
    return [
        sorted(t for _ in range(per_step) for t in next(batches)[0][:, 0].tolist())
        for _ in range(steps)
    ]


@pytest.fixture
def ramp(tmp_path):
    """Tokens 0, 1, 2, ...: a window's first token is its offset."""
    return write(tmp_path / "train.bin", np.arange(1000))


def test_targets_are_the_tokens_one_later(ramp):
    tokens, targets = next(loader(ramp).micro_batches(0))
    assert tokens.shape == targets.shape == (2, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens + 1, targets)


@pytest.mark.parametrize("n_tokens", [33, 64, 95, 96, 127, 1000])
def test_all_tokens_are_trained_on(tmp_path, n_tokens):
    """The rest after the last whole window was never read: up to a third of a small text."""
    found = loader(write(tmp_path / "t.bin", range(n_tokens)), 32, batch_size=1, accumulation=1)
    every = set(range(1, n_tokens))
    missing = set(every)
    for step in range(4000):
        targets = set(range(*(found.starts(step, 0)[0] + [1, 33])))
        assert targets <= every
        missing -= targets
        if not missing:
            break
    assert not missing


def test_an_iteration_without_a_micro_batch_is_refused(ramp):
    """The run trained on nothing, with a loss of 0."""
    with pytest.raises(AssertionError, match="an iteration without a micro-batch"):
        loader(ramp, batch_size=4, accumulation=0)
    with pytest.raises(AssertionError, match="an iteration without a micro-batch"):
        loader(ramp, batch_size=4, accumulation=1, process=Process(0, 2))


def test_step_is_a_pure_function_of_seed_and_step(ramp):
    whole = first_tokens(loader(ramp), 10)
    assert first_tokens(loader(ramp), 4, first=6) == whole[6:]
    assert first_tokens(loader(ramp, seed=2), 10) != whole


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 8), (8, 1), (4, 2)])
def test_global_batch_does_not_depend_on_its_split(ramp, batch_size, accumulation):
    split = loader(ramp, batch_size=batch_size, accumulation=accumulation)
    assert first_tokens(split, 5) == first_tokens(loader(ramp), 5)


def test_f26_processes_draw_disjoint_slices_of_the_same_global_batch(ramp):
    parts = [first_tokens(loader(ramp, process=Process(r, 2)), 5) for r in range(2)]
    for step, expected in enumerate(first_tokens(loader(ramp), 5)):
        assert not set(parts[0][step]) & set(parts[1][step])
        assert sorted(parts[0][step] + parts[1][step]) == expected


def test_f26_naive_random_offsets_repeat_and_overlap():
    draws = [np.random.default_rng(rank).integers(0, 992, 100) for rank in range(2)]
    assert set(draws[0].tolist()) & set(draws[1].tolist())
    assert len(set(draws[0].tolist())) < 100


def test_an_epoch_visits_every_window_once_from_a_random_phase(ramp):
    one = loader(ramp, batch_size=1, accumulation=1)
    n = one.windows_per_epoch
    epochs = [[int(one.starts(e * n + i, 0)[0]) for i in range(n)] for e in range(3)]
    for starts in epochs:
        phase = min(starts)
        assert 0 <= phase < 8
        assert sorted(starts) == [phase + 8 * i for i in range(n)]
        assert starts != sorted(starts)
    assert len({min(starts) for starts in epochs}) > 1


def test_permutation_is_one_and_looks_random():
    for n in (1, 2, 3, 7, 64, 1000):
        assert sorted(permute(np.arange(n), n, key=5)) == list(range(n))
    keys = scramble(np.arange(3000), key=0).tolist()
    places = np.array([permute(np.arange(10), 10, key) for key in keys])
    for i in range(10):  # every element lands everywhere equally often: 300 +- 5 standard errors
        assert (abs(np.bincount(places[:, i], minlength=10) - 300) < 85).all()


def test_data_order_never_changes(ramp):
    """Golden values: a run resumed with a newer version must see the same data."""
    assert loader(ramp).starts(0, 0).tolist() == [926, 510]


def test_offset_goes_on_where_another_global_batch_stopped(ramp):
    old = loader(ramp, batch_size=2, accumulation=4)
    new = loader(ramp, batch_size=2, accumulation=2, offset=old.position(6) - 6 * 4)
    assert new.position(6) == old.position(6)
    assert first_tokens(new, 2, first=6)[0] != first_tokens(loader(ramp, accumulation=2), 1, 6)[0]


def test_f23_validation_windows_are_fixed_and_divided_among_processes(ramp):
    file = TokenFile(ramp, 8, 2**16)
    whole = [tokens for tokens, *_ in eval_batches(file, 4, 32)]
    again = [tokens for tokens, *_ in eval_batches(file, 4, 32)]
    assert all(map(torch.equal, whole, again))
    assert len(whole) == 8 and all(tokens.shape == (4, 8) for tokens in whole)
    starts = torch.cat(whole)[:, 0]
    assert starts[0] == 0 and starts[-1] == 1000 - 9 and (starts.diff() > 0).all()
    parts = [
        [tokens for tokens, *_ in eval_batches(file, 4, 32, Process(rank, 2))] for rank in (0, 1)
    ]
    assert len(parts[0]) == len(parts[1]) == 4
    assert torch.equal(torch.cat(parts[0] + parts[1]).sort(0).values, torch.cat(whole))


@pytest.mark.parametrize("batch_size, processes", [(1, 1), (4, 1), (16, 1), (1, 3), (4, 2), (3, 4)])
def test_f15_an_evaluation_has_the_same_windows_however_it_is_split(ramp, batch_size, processes):
    """A finer split must not change the loss: padding of the last batch does not count."""
    file, found, shares = TokenFile(ramp, 8, 2**16), [], 0.0
    for rank in range(processes):
        place = Process(rank, processes)
        for tokens, targets, share in eval_batches(file, batch_size, 10, place):
            assert tokens.shape == targets.shape == (batch_size, 8) and (tokens >= 0).all()
            if not share:  # no targets of -1 alone: their mean would be NaN with PyTorch's losses
                assert torch.equal(targets, tokens + 1)
                continue
            counted = (targets != -1).all(dim=1)
            assert (
                counted.sum() == round(10 * share) and ((targets == -1).all(dim=1) | counted).all()
            )
            found += tokens[counted, 0].tolist()
            shares += share
    assert sorted(found) == np.linspace(0, 1000 - 9, 10).astype(int).tolist()
    assert shares == pytest.approx(1.0)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_f17_resident_memory_stays_constant(tmp_path):
    path = tmp_path / "big.bin"
    with open(path, "wb") as file:
        file.truncate(256 * 2**20)

    def resident_mib():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    naive = np.memmap(path, dtype=np.uint16, mode="r")
    before = resident_mib()
    naive[:: 2**10].sum()
    assert resident_mib() - before > 200  # a plain memmap keeps every page it has read
    del naive

    before = resident_mib()
    file = TokenFile(path, 2**15, vocab_size=100)
    for start in range(0, 2**27 - 2**16, 2**16):
        file.windows(np.array([start, start + 2**15]))
    assert resident_mib() - before < 20


def test_f36_data_shorter_than_a_window_says_how_many_tokens_are_needed(tmp_path):
    path = write(tmp_path / "train.bin", np.arange(8))
    with pytest.raises(ValueError, match="8 tokens, but block_size=8 needs at least 9.*=7"):
        TokenFile(path, 8, 100)
    shortest = loader(write(path, np.arange(9)))
    assert first_tokens(shortest, 2) == [[0] * 8] * 2


def test_f37_token_outside_the_vocabulary_is_found_when_opened(tmp_path):
    path = write(tmp_path / "train.bin", [1, 2, 3, 70] * 100)
    with pytest.raises(ValueError, match="token id 70, but the model's vocabulary has 65"):
        TokenFile(path, 8, 65)


def test_f37_token_outside_the_vocabulary_beyond_the_scan_is_found_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr("steady.dataloader.SCAN_TOKENS", 100)
    path = write(tmp_path / "train.bin", [1] * 200 + [70] * 20)
    file = TokenFile(path, 8, 65)
    with pytest.raises(ValueError, match="token id 70"):
        file.windows(np.array([0, 200]))


def test_uint32_files_hold_large_vocabularies(tmp_path):
    path = write(tmp_path / "train.bin", [70000] * 20, "uint32")
    assert TokenFile(path, 8, 100000, "uint32").windows(np.array([0])).max() == 70000


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_empty_or_odd_sized_file_is_refused(tmp_path, content):
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"has {len(content)} bytes"):
        TokenFile(path, 8, 100)


def test_missing_data_set_says_which_command_prepares_it(tmp_path):
    (tmp_path / "prepare.py").write_text("")
    with pytest.raises(ValueError, match="run python .*prepare.py"):
        read_meta(tmp_path)
    with pytest.raises(ValueError, match="data/text/prepare.py --input=FILE --out=.*nowhere"):
        read_meta(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no data set at data/nowhere .*--out=data/nowhere$"):
        DataSet("data/nowhere")
    with pytest.raises(ValueError, match="first lines of config/eval_pretrained.py show"):
        DataSet("smollm2")
    with pytest.raises(ValueError, match="data/text/prepare.py --input=FILE"):
        read_meta(tmp_path / "smollm2")  # that config does not make this one


def test_missing_validation_file_and_broken_meta_are_named(tmp_path):
    write(tmp_path / "train.bin", [1] * 20)
    assert read_meta(tmp_path) == {}
    with pytest.raises(UserError, match="there is no .*val.bin: copy or prepare"):
        DataSet(str(tmp_path))
    write(tmp_path / "val.bin", [1] * 20)
    summary = DataSet(str(tmp_path)).summary(8)
    assert summary.endswith("20 tokens, 8 per iteration (no meta.json: assuming GPT-2 tokens)")
    (tmp_path / "meta.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match="nanoGPT's meta.pkl, not steadyGPT's meta.json: prepare"):
        read_meta(tmp_path)
    (tmp_path / "meta.pkl").unlink()
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 5}))
    assert read_meta(tmp_path) == {"vocab_size": 5}
    assert DataSet(str(tmp_path)).summary(8).endswith("8 per iteration")
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ValueError, match="meta.json cannot be read"):
        read_meta(tmp_path)


def test_f49_files_of_other_trainers_are_not_trained_on_as_noise(tmp_path):
    (tmp_path / "train.bin").touch()
    (tmp_path / "meta.json").write_text('{"vocab_size": 15, "itos": {}, "stoi": {}}')
    with pytest.raises(UserError, match="nanoGPT's meta.pkl, not steadyGPT's"):
        read_meta(tmp_path)
    for n_bits, header in ((16, 20240520), (32, 20240801)):
        shard = np.array([header, 1, 100] + [0] * 253, np.int32).tobytes()
        path = tmp_path / f"shard{n_bits}"
        path.write_bytes(shard + np.arange(100, dtype=f"u{n_bits // 8}").tobytes())
        with pytest.raises(UserError, match=r"shard of llm.c: remove its header .*tail -c \+1025"):
            TokenFile(path, 8, 70000, f"uint{n_bits}")
    np.save(tmp_path / "array", np.arange(100))
    with pytest.raises(UserError, match=r"is a .npy file: write its array with .astype\('uint16"):
        TokenFile(tmp_path / "array.npy", 8, 70000)
    path = write(tmp_path / "wide", [5, 70000, 3, 0] * 10, "uint32")
    with pytest.raises(UserError, match="64-bit ids.*write them as uint16"):
        TokenFile(path, 8, 70001)
    assert TokenFile(path, 8, 70001, "uint32").n_tokens == 40
    assert TokenFile(write(tmp_path / "ones", [1, 0] * 20), 8, 2).n_tokens == 40


def test_a_bad_batch_ends_the_run_instead_of_hanging(tmp_path, monkeypatch):
    monkeypatch.setattr("steady.dataloader.SCAN_TOKENS", 1)
    path = write(tmp_path / "train.bin", [1] + [70] * 200)
    bad = DataLoader(TokenFile(path, 8, 65), 2, 1, 1)
    with pytest.raises(ValueError, match="token id 70"):
        next(bad.micro_batches(0))


BROKEN_META = [
    ("[1, 2]", "cannot be read: it holds a list"),
    ("null", "cannot be read: it holds a NoneType"),
    ("[" * 100_000, "cannot be read"),
    ('{"vocab_size": ' + "[" * 500 + "]" * 500 + "}", '"vocab_size" has no valid value: '),
    ('{"dtype": "float32"}', '"dtype" has no valid value: .float32.'),
    ('{"dtype": "int8"}', '"dtype" has no valid value: .int8.'),
    ('{"dtype": "object"}', '"dtype" has no valid value: .object.'),
    ('{"dtype": ["uint16"]}', '"dtype" has no valid value: '),
    ('{"vocab_size": "13"}', '"vocab_size" has no valid value: '),
    ('{"vocab_size": true}', '"vocab_size" has no valid value: '),
    ('{"vocab_size": 13.0}', '"vocab_size" has no valid value: '),
    ('{"vocab_size": 1e400}', '"vocab_size" has no valid value: '),
    ('{"vocab_size": -5}', '"vocab_size" has no valid value: '),
    ('{"tokenizer": "large"}', '"tokenizer" has no valid value: .large.'),
    ('{"tokenizer": ["char"]}', '"tokenizer" has no valid value: '),
    ('{"tokenizer": null}', '"tokenizer" has no valid value: None'),
    ('{"tokenizer": "char"}', '"alphabet" is missing'),
    ('{"tokenizer": "char", "alphabet": ["a"]}', '"alphabet" has no valid value: '),
    ('{"tokenizer": "char", "alphabet": "aa"}', '"alphabet" has no valid value: '),
    ('{"tokenizer": "char", "alphabet": "ab", "vocab_size": 64, "dtype": "uint16"}',
     '"vocab_size" is 64, but its tokenizer has 2 to 2 ids'),
    ('{"tokenizer": "char", "alphabet": "ab", "vocab_size": 3, "dtype": "uint16"}',  # F68
     '"vocab_size" is 3, but its tokenizer has 2 to 2 ids'),
    ('{"tokenizer": "char", "alphabet": "ab", "vocab_size": 1, "dtype": "uint16"}',
     '"vocab_size" is 1, but its tokenizer has 2 to 2 ids'),
    ('{"tokenizer": "char", "alphabet": "ab", "vocab_size": 4, "dtype": "uint16", '
     '"end_of_text": 2}', '"vocab_size" is 4, but its tokenizer has 2 to 3 ids'),
    ('{"tokenizer": "char", "alphabet": "ab", "vocab_siye": 2, "dtype": "uint16"}',
     '"vocab_size" is missing'),
    ('{"tokenizer": "byte", "vocab_size": 257, "dtipe": "uint32"}',
     '"dtype" is missing'),
    ('{"tokeniser": "char", "alphabet": "ab", "vocab_size": 2, "dtype": "uint16"}',
     '"tokenizer" is missing'),
    ('{"tokenizer": "hf"}', '"json" is missing'),
    ('{"end_of_text": "x"}', '"end_of_text" has no valid value: '),
    ('{"unigram_entropy": "x"}', '"unigram_entropy" has no valid value: '),
    ('{"unigram_entropy": NaN}', '"unigram_entropy" has no valid value: nan'),
    ('{"tokens": 5}', '"tokens" has no valid value: 5'),
]  # fmt: skip


def test_f49_metadata_of_every_wrong_shape_is_one_line_that_names_file_and_key(tmp_path):
    """Before the fix, dtype "object" turned ids into pointers, and other dtypes into garbage."""
    write(tmp_path / "train.bin", [1] * 20)
    for content, message in BROKEN_META:
        (tmp_path / "meta.json").write_text(content)
        with pytest.raises(ValueError, match=f"meta.json.*{message}") as error:
            read_meta(tmp_path)
        assert "\n" not in str(error.value)


def test_f51_a_file_cut_short_while_it_is_read_is_an_error_not_a_signal(tmp_path):
    path = write(tmp_path / "train.bin", np.arange(50_000))
    cut = loader(path)
    batches = cut.micro_batches(0)
    next(batches)
    os.truncate(path, 0)
    with pytest.raises(ValueError, match="train.bin had 50000 tokens .* is shorter now"):
        for _ in range(3):
            next(batches)
    with pytest.raises(ValueError, match="train.bin had 50000 tokens .* is shorter now"):
        next(eval_batches(cut.file, 4, 32))
