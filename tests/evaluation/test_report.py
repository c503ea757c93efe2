"""The report: a self-contained page, a card that the hub can read, and figures that match the directory."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import moepack
import packed_support as support
from browser_support import BROWSER
from moepack.checkpoint import Checkpoint
from moepack.cli import app
from moepack.evaluation import EvaluationReport, record_reference
from moepack.format import PackedDirectory
from moepack.format.balance import balance_of
from moepack.report.card import Source, render_card
from moepack.report.charts import Scale, short_layer
from moepack.report.contents import role_sizes
from moepack.report.experts import read_values
from moepack.report.facts import Facts
from moepack.report.page import render_page
from moepack.report.quality import Continuation, Quality
from moepack.report.writing import write_report

VOID = {"meta", "br"}


class Dom(HTMLParser):
    """Tags with their attributes and texts; rejects tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(text)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("The sea said nothing. The wolf <b>& the fire</b> said no more than that.\n" * 30, encoding="utf-8")
    return file


@pytest.fixture
def copy(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "packed")


@pytest.fixture
def facts(packed):
    """A model with complete information and names that need HTML escaping."""
    directory = PackedDirectory.open(packed)
    values = [replace(each, tokens=(0, 5, 90, 4000), errors=(0.1, 0.2, 0.1, 0.3)) for each in read_values(directory)]
    figures = EvaluationReport(1533, 3.5, 33.1, 2.0, 3.4, 29.96, 0.05, 0.875, 1 << 20)
    written = Continuation("<script>alert(1)</script>", "same then & packed", "same then original")
    quality = Quality("a&b.txt", 2000, figures, (written,))
    return Facts("model <i>", "org/model", directory.manifest, False, values, quality)


def test_the_page_stands_alone(facts):
    page = render_page(facts)
    dom = Dom(page)
    assert not re.search(r"https?://|url\(|@import|src=", page)
    assert {tag for tag, _ in dom.tags}.isdisjoint({"script", "link", "img", "iframe", "i onload"})
    assert len(dom.all("h1")) == 1 and len(dom.all("h2")) == 7
    assert "<script>alert" not in page and "model &lt;i&gt;, packed" in page
    assert "prefers-color-scheme: dark" in page and all("aria-label" in each for each in dom.all("svg"))
    assert "".join(dom.texts["span"]).count("packed") == 1  # the packed model differs from the original here
    assert [each for each in dom.texts["dd"] if "%" in each] == ["87.5%"]


def test_every_mark_lies_in_its_drawing(facts):
    drawing, shift = [], [0.0, 0.0]
    for tag, attributes in Dom(render_page(facts)).tags:
        if tag == "svg":
            drawing, shift = [float(each) for each in attributes["viewbox"].split()], [0.0, 0.0]
        if tag == "g":
            shift = [float(each) for each in re.findall(r"[\d.]+", attributes["transform"])]
        if tag == "rect":
            x, y, width, height = (float(attributes.get(name, 0)) for name in ("x", "y", "width", "height"))
            right, bottom = shift[0] + x + width, shift[1] + y + height
            assert x >= 0 and y >= 0 and width > 0 and right <= drawing[2] + 0.1 and bottom <= drawing[3]


def test_each_expert_has_its_cell(facts):
    titles = Dom(render_page(facts)).texts["title"]
    assert "layer 1, down_proj, expert 3: 30.0%" in titles
    assert "layer 0, experts, expert 0: 0 tokens" in titles
    assert sum("%" in title for title in titles) == 6 * 4


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("model.layers.12.mlp.experts", "layer 12"),
        ("decoder.block.3.layer.2.mlp.experts", "decoder 3"),
        ("model.embed_tokens", "embed_tokens"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_of_rows_are_short(module, name):
    assert short_layer(module) == name


def test_formats_are_listed_with_their_bits(facts):
    page = render_page(facts)
    weights = sum(np.prod(row.shape) for row in facts.rows)
    bits = 8 * sum(row.after for row in facts.rows) / weights
    assert f"<td>6</td><td>{bits:.2f}</td>" in page


def test_unknown_entries_are_omitted_and_reported(facts):
    bare = replace(facts, quality=None, values=[replace(each, tokens=None, errors=None) for each in facts.values])
    page = render_page(bare)
    Dom(page)
    assert "Not measured" in page and "Coverage" not in page and "Sample texts" not in page
    assert "Relative error" not in page
    alone = EvaluationReport(1533, 3.5, 33.1, 2.0)
    page = render_page(replace(facts, quality=replace(facts.quality, figures=alone, continuations=())))
    Dom(page)
    assert "divergence from the original" not in page and "3.5000" in page


def test_errors_match_the_weights(mixtral, packed):
    directory = PackedDirectory.open(packed)
    values = read_values(directory, Checkpoint.open(mixtral))
    original = moepack.describe(Checkpoint.open(mixtral)).layers[1].projections[2]
    decoded = torch.from_numpy(directory.blob(original.packed_name).dequantize())
    decoded = balance_of(directory.path).restored("model.layers.1.mlp.experts.down_proj", decoded).numpy()
    expected = [
        np.linalg.norm(original.expert(i).float().numpy() - decoded[i]) / np.linalg.norm(original.expert(i).float())
        for i in range(4)
    ]
    last = values[-1]
    assert (last.module, last.projection) == ("model.layers.1.mlp.experts", "down_proj")
    assert last.errors == pytest.approx(expected, rel=1e-4)
    records = {(record.module, record.projection): record for record in directory.manifest.packed().values()}
    for each in values:
        record = records[each.module, each.projection]
        assert np.mean(each.bits) == pytest.approx(8 * record.nbytes / np.prod(record.shape), rel=1e-6)


def test_roles_add_up_to_the_tensors(packed):
    manifest = PackedDirectory.open(packed).manifest
    roles = role_sizes(manifest)
    assert sum(role.after for role in roles) == sum(record.nbytes for record in manifest.tensors.values())
    assert {role.role for role in roles} == {"experts", "attention", "embeddings", "routers", "norms"}
    assert next(role for role in roles if role.role == "experts").bits_per_weight > 0


@pytest.mark.parametrize(("value", "share"), [(1, 0), (10, 50), (100, 100), (0, 0), (1000, 100)])
def test_a_logarithmic_scale(value, share):
    assert Scale(1, 100, str, logarithmic=True).share(value) == share


def test_the_card_is_the_hubs(facts):
    source = Source({"license": "mit", "base_model": "other/base", "language": ["en"]}, "## Original\n```\n# code\n```")
    card = ModelCard(render_card(facts, source))
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"], data["license"]) == ("org/model", "quantized", "mit")
    assert data["library_name"] == "moepack" and data["pipeline_tag"] == "text-generation"
    assert {"moepack", "mixture-of-experts", "mixtral"} <= set(data["tags"])
    assert "## Original" in card.text and "\n# code\n" in card.text and "3.4000 | 3.5000" in card.text


def test_a_report_leaves_the_weights_sound_and_can_be_repeated(copy, mixtral, text):
    (copy / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The original\nIts card.\n")
    first = write_report(copy, mixtral, text, chars=1600)
    content = first.card.read_text(), first.page.read_text()
    assert moepack.verify(copy).ok
    assert {each.file for each in moepack.verify(copy).side} == {"README.md", "report.html"}
    again = write_report(copy, mixtral, text, chars=1600)
    assert (again.card.read_text(), again.page.read_text()) == content
    assert "license: apache-2.0" in content[0] and content[0].count("Its card.") == 1
    assert first.quality.figures.kl > 0 and len(first.quality.continuations) == 3
    assert moepack.load(copy) is not None and str(mixtral.parent) not in content[0] + content[1]


def test_without_models_and_with_a_saved_reference(copy, mixtral, text, tmp_path):
    written = write_report(copy)
    assert written.quality is None and "Not measured" in written.page.read_text()
    record_reference(mixtral, text, 1600, tmp_path / "reference")
    written = write_report(copy, tmp_path / "reference", text, chars=1600, prompts=["Say"], base_model="a/b")
    (each,) = written.quality.continuations
    assert each.original is None and each.prompt == "Say" and written.quality.figures.kl > 0
    assert "base_model: a/b" in written.card.read_text()


def test_encoder_decoders_write_nothing(switch, text, tmp_path):
    moepack.compress(switch, tmp_path / "out")
    written = write_report(tmp_path / "out", switch, text, chars=1600)
    Dom(written.page.read_text())
    assert written.quality.continuations == () and "pipeline_tag: text2text-generation" in written.card.read_text()


def test_the_command(copy, mixtral, text):
    arguments = ["report", copy, "--reference", mixtral, "--text", text, "--chars", 1600, "--prompt", "The"]
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    assert "report.html" in result.stdout and (copy / "report.html").exists()
    assert CliRunner().invoke(app, ["report", str(copy), "--prompt", "The"]).exit_code == 2
    assert support.contents(copy)["README.md"].startswith(b"---\n")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [420, 1100])
def test_a_browser_shows_it(facts, tmp_path, width):
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render_page(facts), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *flags, f"--window-size={width},2000", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert picture.stat().st_size > 20_000  # an empty page of this size takes some 5 kB
