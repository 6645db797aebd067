"""`sandlot view`: what happened in a run, in the terminal."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.tree import Tree

from sandlot.chat.base import ChatFormat
from sandlot.cli.common import JsonFlag, RunArgument, answer, counted, print_json
from sandlot.cli.texts import exchange_row, show_exchange
from sandlot.errors import ConfigError, JournalError
from sandlot.rollout.dialogue import dialogue
from sandlot.rollout.outcome import EpisodeResult
from sandlot.rollout.progress import STYLES, summary_table
from sandlot.terminal import literal
from sandlot.trajectory.journal import JournalContent, read_journal
from sandlot.trajectory.records import EventRecord, ForkRecord
from sandlot.trajectory.rundir import EpisodeState, RunDir
from sandlot.trajectory.tree import SessionTree


def command(
    run: RunArgument,
    episode: Annotated[str, typer.Argument(help="An episode of the run, to see its turns.")] = "",
    texts: Annotated[bool, typer.Option("--texts", help="Show what the agent sent and the model answered.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the episodes of RUN, or one EPISODE: its token tree, why it forked, its patch and its tests.

    With `--texts`, what was said in it instead: read from the ids, so the model must be on this machine.
    """
    opened = RunDir.read(run)
    if not episode:
        if as_json:
            print_json(list(opened.results()))
            return
        results = list(map(EpisodeResult.from_row, opened.results()))
        answer.print(summary_table(results, answer))
        for result in results:
            why = f"  {result.failure}: {literal(result.detail)}" if result.failure else ""
            answer.print(
                f"[{STYLES[result.state]}]{result.state:>10}[/]  {literal(result.episode_id)}[dim]{why}[/]",
                soft_wrap=True,
            )
        for episode_id in opened.episode_ids():
            try:
                if opened.state(episode_id) is not EpisodeState.FINISHED:
                    answer.print(f"[dim]unfinished[/]  {literal(episode_id)}", soft_wrap=True)
            except JournalError as error:
                why = f"[dim]  {literal(str(error))}[/]"
                answer.print(f"[red]unreadable[/]  {literal(episode_id)}{why}", soft_wrap=True)
        return
    if not opened.journal_path(episode).exists():
        raise ConfigError(f"there is no episode {episode!r} in {run}; `sandlot view {run}` lists them")
    content = read_journal(opened.journal_path(episode))
    row = opened.result(episode)
    if texts:
        said = dialogue(content.turns, _format(opened))
        if as_json:
            print_json({"result": row, "turns": [exchange_row(exchange) for exchange in said]})
            return
        for exchange in said:
            show_exchange(exchange)
        return
    if as_json:
        print_json({"result": row, "turns": [_turn(turn) for turn in content.turns]})
        return
    answer.print(_token_tree(episode, content))
    for event in content.events:
        answer.print(f"[dim]event[/] {literal(_event(event))}", highlight=False, soft_wrap=True)
    if row is not None:
        _show_result(opened, episode, row)


def _event(event: EventRecord | ForkRecord) -> str:
    """What happened beside the turns, in a line."""
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in event.facts.items())
    what = event.kind if isinstance(event, EventRecord) else event.reason
    return f"{what}: {facts}" if facts else what


def _format(opened: RunDir) -> ChatFormat:
    from sandlot.rollout.format import recorded_format

    if (fmt := recorded_format(opened.config)) is None:
        model = opened.config.get("model", "the embedded model")
        raise ConfigError(f"{model} is not on this machine, and texts are read with its tokenizer: bring it there")
    return fmt


def _turn(turn: Any) -> dict[str, Any]:
    return {
        "id": turn.id,
        "parent": turn.parent,
        "branch": turn.branch,
        "prompt_tokens": turn.prompt_length,
        "sampled_tokens": len(turn.output_ids),
        "mean_logprob": float(turn.logprobs.mean()) if len(turn.logprobs) else None,
        "finish_reason": turn.finish_reason,
        "calls": list(turn.parse),
        "fork": turn.fork,
        "delivered": turn.delivered,
        "versions": list(turn.versions),
    }


def _token_tree(episode: str, content: JournalContent) -> Tree:
    """Turns under the turn whose tokens they continue."""
    tree = SessionTree(content.turns)
    root = Tree(f"[bold]{literal(episode)}[/]  {counted(len(content.turns), 'turn')}", guide_style="dim")
    nodes: dict[str, Tree] = {}
    for turn in content.turns:
        parent = tree.parent(turn.id)
        facts = [
            f"{turn.prompt_length:,}+[bold]{len(turn.output_ids):,}[/] tokens",
            turn.finish_reason,
            literal(turn.branch),
        ]
        facts += [f"[cyan]{status}[/]" for status in turn.parse]
        if len(turn.logprobs):
            facts.append(f"[dim]mean logprob {turn.logprobs.mean():.2f}[/]")
        if not turn.delivered:
            facts.append("[red]undelivered[/]")
        if turn.fork:
            facts.append(f"[yellow]fork: {literal(turn.fork)}[/]")
        # A continued turn stands beside its parent, so that a long conversation is a list and only forks indent.
        only_child = parent is not None and len(tree.children(parent)) == 1
        place = nodes[parent] if parent is not None else root
        nodes[turn.id] = place if only_child and parent is not None else place.add("[dim]branch[/]")
        nodes[turn.id].add(f"[dim]{turn.id[:8]}[/] " + "  ".join(facts))
    return root


def _show_result(opened: RunDir, episode: str, row: dict[str, Any]) -> None:
    result = EpisodeResult.from_row(row)
    table = Table(show_header=False, box=None)
    table.add_row("state", f"[{STYLES[result.state]}]{result.state}[/]", f"reward {result.reward}")
    if result.failure:
        table.add_row("failure", str(result.failure), literal(result.detail))
    table.add_row("tokens", f"{result.sampled_tokens:,} sampled", f"{result.trained_tokens:,} trained")
    table.add_row(
        "seconds", f"{result.total_seconds:.1f}", ", ".join(f"{k} {v:.1f}" for k, v in result.seconds.items())
    )
    for test, state in (row["verdict"].get("tests") or {}).items():
        table.add_row("test", f"[{'green' if state == 'passed' else 'red'}]{state}[/]", literal(test))
    answer.print(table)
    patch = opened.patch_path(episode)
    if patch.exists() and (text := patch.read_bytes().decode("utf-8", "replace")):
        answer.print(Panel(literal(text[:8000]), title=literal(str(patch)), border_style="dim"))
