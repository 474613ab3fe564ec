"""Drafts that a causal model checks: whatever was drafted, the text is the causal model's own."""

import itertools
import math
from collections import Counter

import pytest
import torch

import codd
from codd.backbones import mini
from codd.backbones.causal import CausalModel, CausalReader, load_causal
from codd.backbones.loading import BUNDLED
from codd.cli.demo import questions
from codd.decoding.loop import step_inputs
from codd.decoding.runner import FullRecompute
from codd.decoding.samplers import StepInputs, token_distribution
from codd.decoding.speculative import Draft, draft_tokens, judge, verdict
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.cli import printed_json
from tests.support.small_denoisers import network
from tests.support.tiny_models import biased, random_hmm

CPU = torch.device("cpu")
VOCAB, MASK = 5, 4
PROMPT = [0, 2, 1]


def tiny_model(circuit: object = "random", **changed) -> codd.Model:
    hmm = random_hmm(3, VOCAB, seed=2) if circuit == "random" else circuit
    return codd.Model(network(vocab=VOCAB, mask=MASK), hmm, None, MASK, **changed)


@pytest.fixture(scope="module")
def checker():
    return network(causal=True, vocab=VOCAB, mask=MASK, seed=8)


@pytest.fixture(scope="module")
def bundled():
    return codd.load(device="cpu")


def plain(causal: CausalModel, ids: list[int], length: int, mask: int, ends: frozenset[int]) -> list[int]:
    """Greedy decoding, one token a pass."""
    reader, out, new = CausalReader(causal.network, 1, len(ids) + length), list(ids), ids
    for _ in range(length):
        logits = reader.read(torch.tensor([new]))[0, -1]
        logits[mask] = -torch.inf
        new = [int(logits.argmax())]
        out += new
        if new[0] in ends:
            break
    return out


def same_as_plain(model: codd.Model, count: int, length: int) -> None:
    causal = load_causal(BUNDLED / "causal", CPU)
    ids = model.encode([each.question for each in questions(0)[:count]])
    out = model.generate(ids, mode="speculative", gen_length=length)
    for prompt, found in zip(ids, out.sequences, strict=True):
        assert found.tolist() == plain(causal, prompt, length, model.mask_id, model.stop_ids)


def test_at_temperature_0_it_is_plain_causal_decoding(bundled):
    same_as_plain(bundled, 20, 12)


@pytest.mark.slow
@pytest.mark.parametrize("circuit", ["trained", "null"])
def test_at_temperature_0_it_is_plain_causal_decoding_of_200_prompts(bundled, circuit):
    same_as_plain(bundled.with_circuit(circuit), 200, 128)


@pytest.mark.parametrize("circuit", ["random", None])
def test_at_temperature_0_it_is_plain_causal_decoding_of_any_prompt(checker, circuit):
    model, causal = tiny_model(circuit), CausalModel(checker)
    prompts = [list(each) for each in itertools.product(range(4), repeat=2)]
    out = model.generate(prompts, mode="speculative", verifier=checker, gen_length=12, block_length=6)
    for prompt, found in zip(prompts, out.sequences, strict=True):
        assert found.tolist() == plain(causal, prompt, 12, MASK, frozenset())


def checked(causal: CausalModel, ids: list[int], count: int, options: codd.Options) -> torch.Tensor:
    """The checker's distributions of the tokens after each of the last ``count`` ids, from a pass over all."""
    logits = CausalReader(causal.network, 1, len(ids)).read(torch.tensor([ids]), count)[0]
    logits[:, MASK] = -torch.inf
    return token_distribution(logits, options.temperature, options.top_k, options.top_p)


def drafting(model: codd.Model, ids: list[int], options: codd.Options) -> StepInputs:
    """What the first draft after a text is made from."""
    [state] = model.start([ids], options)
    step = step_inputs(state)
    runner = FullRecompute(model.backbone)
    rows = step.send(runner(next(step)))
    with pytest.raises(StopIteration) as end:
        step.send(runner.logits(rows, MASK))
    return end.value.value


def drafts(model: codd.Model, ids: list[int], options: codd.Options, checker: object, count: int):
    """Every draft after a text, with the probability of drawing it; each token is forced by its quantile."""
    inputs = drafting(model, ids, options.changed(verifier=checker))

    def grown(forced: list[int], uniforms: list[float], p: float):
        if len(uniforms) == count:
            draft, acts = draft_tokens(inputs, count, torch.tensor(uniforms))
            assert acts is (model.circuit is not None)
            assert draft.tokens.tolist() == forced
            yield draft, p
            return
        draft, _ = draft_tokens(inputs, len(uniforms) + 1, torch.tensor([*uniforms, 0.5]))
        row = draft.probabilities[-1].double()
        for token in row.nonzero()[:, 0].tolist():
            middle = float((row[:token].sum() + row[token] / 2) / row.sum())
            yield from grown([*forced, token], [*uniforms, middle], p * float(row[token]))

    yield from grown([], [], 1.0)


DRAWN = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}]


@pytest.mark.parametrize("given", DRAWN)
def test_drafts_are_drawn_from_the_joint_given_what_was_drafted_before(checker, given):
    """By the table of all texts of the window."""
    model, length = tiny_model(), 3
    options = codd.Options(mode="speculative", gen_length=length, verifier=checker, **given)
    inputs = drafting(model, PROMPT, options)
    joint = inputs.window(inputs.plan.block).joint(model.circuit, 1.0)
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * length)
    table = torch.cat([joint.log_prob(text[None]) for text in texts])
    for draft, _ in drafts(model, PROMPT, options, checker, length - 1):
        for place, found in enumerate(draft.probabilities):
            fits = (texts[:, :place] == draft.tokens[:place]).all(1)
            given_before = [table[fits & (texts[:, place] == token)].logsumexp(0) for token in range(VOCAB)]
            cut = options.temperature, options.top_k, options.top_p
            wanted = token_distribution(torch.stack(given_before)[None], *cut)[0]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("circuit", ["random", None])
@pytest.mark.parametrize("given", DRAWN)
def test_above_temperature_0_the_text_has_the_checkers_distribution(checker, circuit, given):
    """By enumeration of all drafts, acceptances and tokens that follow them."""
    model, causal, length = tiny_model(circuit), CausalModel(checker), 3
    options = codd.Options(mode="speculative", gen_length=length, **given)
    law: Counter[tuple[int, ...]] = Counter()
    refused = 0.0

    def rounds(written: list[int], weight: float) -> None:
        nonlocal refused
        left = length - len(written)
        if not left:
            law[tuple(written)] += weight
            return
        text = [*PROMPT, *written]
        if left == 1:
            for token, p in enumerate(checked(causal, text, 1, options)[0].tolist()):
                rounds([*written, token], weight * p)
            return
        for draft, q in drafts(model, text, options.changed(gen_length=left), checker, left - 1):
            tokens = draft.tokens.tolist()
            accepts, follow = verdict(draft, checked(causal, [*text, *tokens], left, options))
            kept = weight * q
            for accepted in range(left):
                accept = float(accepts[accepted]) if accepted < len(tokens) else 0.0
                refused += kept * (1 - accept) if accepted < len(tokens) else 0
                for token, p in enumerate(follow[accepted].tolist()):
                    if p * (1 - accept) > 0:
                        rounds([*written, *tokens[:accepted], token], kept * (1 - accept) * p)
                kept *= accept

    rounds([], 1.0)
    assert refused > 0.1, "the checker must have something to refuse"
    for text in itertools.product(range(VOCAB), repeat=length):
        p = math.prod(
            float(checked(causal, [*PROMPT, *text[:place]], 1, options)[0, text[place]]) for place in range(length)
        )
        assert law[text] == pytest.approx(p, abs=1e-6)


def test_chance_decides_as_the_verdict_says():
    generator = torch.Generator().manual_seed(0)
    q, p = torch.rand(2, VOCAB, generator=generator), torch.rand(3, VOCAB, generator=generator)
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    draft = Draft(torch.tensor([1, 3]), q)
    accepts, follow = verdict(draft, p)
    one, two = accepts.tolist()
    assert 0.1 < one < 0.9
    assert 0.1 < two < 0.9
    quantiles = [(2 * i + 1) / 400 for i in range(200)]
    yes, no = (one - 0.01, two - 0.01), (one + 0.01, two + 0.01)
    cases = ((no[0], yes[1], 0), (yes[0], no[1], 1), (yes[0], yes[1], 2))
    for first, second, expected in cases:
        seen: Counter[int] = Counter()
        for last in quantiles:
            accepted, tokens = judge(draft, p, torch.tensor([first, second, last]))
            assert accepted == expected
            assert tokens[:-1].tolist() == draft.tokens[:accepted].tolist()
            seen[int(tokens[-1])] += 1
        for token, p_token in enumerate(follow[expected].tolist()):
            assert seen[token] / 200 == pytest.approx(p_token, abs=2 / 200)


def test_drawn_texts_have_the_checkers_frequencies(checker):
    model, count, length = tiny_model(), 500, 3
    out = model.generate(
        [PROMPT] * count, mode="speculative", verifier=checker, temperature=1.0, gen_length=length, seed=range(count)
    )
    seen = Counter(tuple(each.tolist()[len(PROMPT) :]) for each in out.sequences)
    options, causal, statistic, cells = codd.Options(temperature=1.0), CausalModel(checker), 0.0, 0
    for text in itertools.product(range(VOCAB - 1), repeat=length):
        rows = checked(causal, [*PROMPT, *text], length + 1, options)[:-1]
        expected = count * float(rows.gather(-1, torch.tensor(text)[:, None]).prod())
        if expected > 3:
            statistic, cells = statistic + (seen[text] - expected) ** 2 / expected, cells + 1
    assert cells > 10
    assert statistic < cells + 4 * math.sqrt(2 * cells)


def test_a_stream_says_what_was_drafted_and_accepted(checker):
    model, given = tiny_model(), {"mode": "speculative", "verifier": checker, "gen_length": 20, "block_length": 8}
    out = model.generate([PROMPT], **given)
    steps = list(model.denoise([PROMPT], **given))
    assert steps[-1].ids.tolist() == out.sequences[0].tolist()
    assert [step.number for step in steps] == list(range(out.steps[0]))
    checks = [step for step in steps if len(step.positions)]
    assert sum(step.circuit for step in steps) == out.circuit_steps[0] == len(steps) - len(checks)
    assert sum(step.accepted + 1 for step in checks) == 20
    assert any(step.accepted for step in checks)
    at = len(PROMPT)
    for step in checks:
        assert step.accepted <= step.drafted <= 8
        assert step.positions.tolist() == list(range(at, at + step.accepted + 1))
        at += step.accepted + 1
        assert step.settled == at
    assert all(step.drafted == 0 for step in steps if step not in checks)


def test_scores_are_the_checkers_probabilities(checker):
    out = tiny_model().generate([PROMPT], mode="speculative", verifier=checker, gen_length=9)
    ids = out.sequences[0]
    rows = checked(CausalModel(checker), ids.tolist(), len(ids), codd.Options(temperature=1.0))
    expected = rows[len(PROMPT) - 1 : -1].gather(-1, ids[len(PROMPT) :, None])[:, 0]
    assert torch.allclose(out.scores[0], expected, atol=1e-5)


def test_factorized_drafts_without_the_circuit(checker):
    given = {"mode": "speculative", "verifier": checker, "gen_length": 14}
    alone, left_out = (
        tiny_model(None).generate([[1]], **given),
        tiny_model().generate([[1]], sampler="factorized", **given),
    )
    assert torch.equal(left_out.sequences[0], alone.sequences[0])
    assert left_out.circuit_steps == alone.circuit_steps == [0]
    assert left_out.steps == alone.steps


def test_where_nothing_is_accepted_the_checker_goes_on_alone(checker):
    one, two = (torch.zeros(VOCAB).scatter(0, torch.tensor([token]), 99.0) for token in (1, 2))
    model = codd.Model(biased(tiny_model().backbone, one), None, None, MASK)
    steps = list(model.denoise([PROMPT], mode="speculative", verifier=biased(checker, two), gen_length=50))
    assert steps[-1].ids[len(PROMPT) :].tolist() == [2] * 50
    drafts = [step.number for step in steps if not len(step.positions)]
    assert 5 < len(drafts) < 20
    assert max(drafts) > 30, "it is tried again"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_causal_mode_checks_its_own_drafts(temperature):
    model = codd.load(FIXTURES / "decode_nemotron_diffusion", None, device="cpu")
    vocab, causal = model.backbone.vocab_size, CausalModel(model.backbone.causal)
    prompts, given = [[5, 6, 7], [8], [9, 3]], {"mode": "speculative", "gen_length": 14, "temperature": temperature}
    joint = codd.Model(model.backbone, random_hmm(3, vocab), None, model.mask_id)
    out = joint.generate(prompts, **given)
    steps = list(joint.denoise(prompts, **given))
    for number, prompt in enumerate(prompts):
        own = [step for step in steps if step.sequence == number]
        assert torch.equal(own[-1].ids, out.sequences[number])
        if temperature == 0:
            assert own[-1].ids.tolist() == plain(causal, prompt, 14, model.mask_id, frozenset())
        written = [len(prompt), *(step.settled for step in own)]
        for step, begin in zip(own, written, strict=False):
            if not len(step.positions):  # a block begins with the causal network's own token
                assert step.circuit
                assert step.window[0] == begin - 1


def test_the_context_is_not_computed_again(checker):
    """But by a network that is told the share of masks."""
    given, prompts = {"mode": "speculative", "gen_length": 20, "block_length": 6}, [PROMPT, [3], [1, 0, 2, 2, 0, 1]]
    steps = list(tiny_model().denoise(prompts, verifier=checker, **given))
    for number in range(len(prompts)):
        drafts = [step for step in steps if step.sequence == number and not len(step.positions)]
        assert drafts[0].computed == drafts[0].window[1]
        assert len(drafts) > 1
        for before, step in itertools.pairwise(drafts):
            assert step.computed == step.window[1] - before.window[0]
            assert step.cached == before.window[0]
    mdlm = codd.load(FIXTURES / "mdlm_timecond", None, device="cpu")
    causal = network(causal=True, vocab=mdlm.backbone.vocab_size, mask=mdlm.mask_id)
    drafts = [step for step in mdlm.denoise([[1, 2]], verifier=causal, **given) if not len(step.positions)]
    assert [step.cached for step in drafts] == [0] * len(drafts)


def test_it_stops_before_a_text_and_at_the_end(bundled):
    question = questions(0)[0].question
    whole = bundled.generate(question, mode="speculative")
    assert int(whole.sequences[0][-1]) in bundled.stop_ids
    cut = bundled.generate(question, mode="speculative", stop=[" ="])
    assert " =" in whole.texts[0]
    assert cut.texts[0] == whole.texts[0][: whole.texts[0].index(" =")]


def test_the_command_line_gives_what_generate_gives(bundled, capsys):
    question = questions(0)[0].question
    told = ["--mode", "speculative", "--gen-length", 24, "--device", "cpu"]
    printed = printed_json(capsys, "generate", *told, question)
    assert printed["text"] == bundled.generate(question, mode="speculative", gen_length=24).texts[0]
    assert printed["settings"]["mode"] == "speculative"


def test_a_verifier_is_a_network_a_model_or_a_folder(tmp_path, checker):
    mini.save(checker, tmp_path)
    ids = [[0, 1, 2], [3]]
    given = {"mode": "speculative", "gen_length": 10}
    forms = [checker, codd.Model(checker, None, None, MASK), tmp_path, str(tmp_path)]
    found = [tiny_model().generate(ids, verifier=verifier, **given).sequences for verifier in forms]
    for each in found[1:]:
        assert all(map(torch.equal, found[0], each))
    beside = tmp_path / "checkpoint"
    mini.save(checker, beside / "causal")
    assert all(map(torch.equal, found[0], tiny_model(folder=beside).generate(ids, **given).sequences))


def test_a_model_of_transformers_checks():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.5)).eval()
    prompts = [[0, 1, 2], [3]]
    out = tiny_model().generate(prompts, mode="speculative", verifier=gpt2, gen_length=12)
    for prompt, found in zip(prompts, out.sequences, strict=True):
        ids = list(prompt)
        for _ in range(12):
            logits = gpt2(torch.tensor([ids])).logits[0, -1].detach()
            logits[MASK] = -torch.inf
            ids.append(int(logits.argmax()))
        assert found.tolist() == ids
    with pytest.raises(InvalidInput, match="the verifier was made for 32"):
        tiny_model().generate([[0] * 30], mode="speculative", verifier=gpt2, gen_length=12)


def test_prompts_and_verifiers_that_cannot_be_used_are_refused(checker, tmp_path):
    model, given = tiny_model(), {"mode": "speculative", "gen_length": 8}
    with pytest.raises(InvalidInput, match="give verifier=, a causal model of the same tokens"):
        model.generate([PROMPT], **given)
    cases = [
        ([[0, MASK]], checker, "prompt 0 has masks"),
        ([PROMPT, []], checker, "prompt 1 is empty"),
        ([PROMPT], model, "the verifier: is a denoiser"),
        ([PROMPT], 3, "verifier must be a causal model, or the folder or hub id of one, found 3"),
        ([PROMPT], network(causal=True, vocab=VOCAB - 2, mask=0), "the causal model has 3 tokens, the network 5"),
    ]
    for prompts, verifier, words in cases:
        with pytest.raises(InvalidInput, match=words):
            model.generate(prompts, verifier=verifier, **given)


def test_a_verifier_with_other_tokens_is_refused(bundled, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in (BUNDLED / "causal").iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b"<|assistant|>", b"<|helper|>")
        (folder / file.name).write_bytes(text)
    with pytest.raises(InvalidInput, match="the causal model reads other tokens"):
        bundled.generate("Two and two?", mode="speculative", verifier=folder)
