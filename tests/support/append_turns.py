"""Appends turns to a journal for ever and says each one's number once it is on disk: `python append_turns.py PATH`."""

import itertools
import sys

from sandlot.trajectory.journal import JournalWriter
from sandlot.trajectory.records import SessionRecord
from support.sessions import make_turn

with JournalWriter(sys.argv[1]) as journal:
    if journal.content.header is None:
        journal.append(SessionRecord(episode_id="e", group_id="g"))
    for k in itertools.count(len(journal.content.turns)):
        journal.turn(make_turn(f"t{k}", range(200), range(50)))
        print(k, flush=True)
