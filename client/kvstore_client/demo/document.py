"""The text that the demo talks about: a made-up handbook of about 2,000 tokens, and questions on
it.

Written for this demo. A long document that every turn repeats is the case a prefix store is for.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DOCUMENT", "QUESTIONS", "RULES"]

RULES: Final = "You answer questions about the handbook below in one short sentence.\n\n"

QUESTIONS: Final = (
    "Who may open the sluice by hand?",
    "And how long must the keeper wait after the second bell?",
    "What is the lamp oil store called?",
)

DOCUMENT: Final = """\
HANDBOOK OF THE NORTHMERE TIDE STATION

1. What the station is for. The Northmere tide station stands where the river Aller meets the sea.
It keeps three things in order: the sluice, which lets the river out and holds the sea back; the
gauge, which writes down the height of the water; and the lamp, which tells boats where the channel
runs. A keeper and two hands live at the station. One of the three is awake at every hour. Nothing
in this handbook is a reason to risk a life: a sluice can be rebuilt, a lamp can be lit again.

2. The sluice. The sluice has four gates, named North, Heron, Mill and Old. North and Heron are
moved by the tide engine. Mill and Old are moved by hand wheels. In ordinary weather the tide engine
opens North when the sea has fallen two hand-widths below the river, and closes it when the sea has
come back to one hand-width below. Heron follows North after a quarter of an hour, so that the pool
between them fills slowly. Only the keeper may open the sluice by hand, and only after the second
bell has been rung. A hand who sees that the engine has stopped closes nothing and opens nothing;
the hand rings the first bell and wakes the keeper.

3. The bells. There are two bells. The first bell hangs in the gauge room and calls people inside
the station. The second bell hangs on the seaward wall and warns people in boats and on the flats.
After the second bell the keeper waits twelve minutes by the sand glass before a gate is moved by
hand, because a person on the flats needs that long to reach the ladder. If somebody is seen on the
flats when the glass has run out, the glass is turned again. The bells are rung every first Monday
at noon, one stroke each, to hear whether they are sound. A cracked bell is taken down the same day.

4. The gauge. The gauge is a float in a pipe. The pipe is open to the sea through a hole as wide as
a thumb, so that waves do not reach the float but the tide does. A pen on the float draws a line on
a drum that turns once a day. The paper is changed at four in the morning, when the hand on watch is
awake in any case. The old sheet is signed, dated and laid flat in the long drawer. Do not correct a
line that looks wrong. Write beside it what you saw: ice, weed in the pipe, a blocked pen, a ship's
wash. A false line that says what happened is worth more than a smooth one that does not.

5. Reading the gauge. Heights are in hand-widths above the brass stud in the north wall. One
hand-width is ten centimetres. The ordinary spring tide reaches thirty-one; the highest that was
ever measured reached forty-four, in the winter when the Mill gate was lost. At thirty-six the
keeper orders the lower store to be emptied. At thirty-nine everybody leaves the lower floor. At
forty-one the station is left by the causeway, if the causeway still shows, and otherwise everyone
goes up to the lamp room and waits there with the box of dry clothes.

6. The lamp. The lamp is lit half an hour before sunset and put out half an hour after sunrise. In
fog it burns all day. The light is white to the north and red to the east, where the bar lies. The
red glass is thin and older than the station; it is washed with rain water and a soft cloth and
never with sand. The lamp oil store is called the Larder, since it was one, and its key hangs behind
the clock. Oil is drawn by daylight only. Nobody takes a flame into the Larder, and nobody sleeps in
the room above it when the store is more than half full.

7. The watch. The day has four watches of six hours. The keeper stands the watch that begins at
midnight on odd days and the one that begins at six in the evening on even days; the hands divide
the others between them. Whoever comes on watch reads the last page of the log aloud to whoever goes
off. The person who goes off stays until the reading is done. If both agree that something is not
clear, both sign the question, and the keeper answers it in writing before noon.

8. The log. Each entry in the log has a time, a name, what was seen and what was done, in this order
and on one line. Weather is written in plain words. Guesses are marked with a query in the margin.
Nothing is erased: a wrong entry is struck through once, so that it can still be read, and the right
one is written below. A full book goes to the harbour office by the Thursday boat. The harbour
office returns a receipt, and the receipt is pasted into the next book.

9. Boats. The station owns a rowing boat, the Plover, and may call the pilot cutter by two red flags
on the mast. The Plover is kept with her oars in and her plug beside the plug hole, tied by a
string, so that nobody forgets it and nobody loses it. She carries four people, or two people and
the spare float of the gauge. She is not taken over the bar, in any weather, for any reason. Between
the bar and the wall the ebb runs faster than two people can row, for an hour and a half after North
has been opened. The times at which North was opened are chalked on the door of the boat house.

10. Stores. Flour, peas, salt fish and tea come with the Thursday boat. Four weeks of food are kept,
counted on the last day of each month. Water is caught from the roof in the two stone tanks; the
eastern tank is for drinking. If a gull has died on the roof, the pipe to the eastern tank is closed
until the next rain has washed the slates. Coal is kept dry in the tower's foot. A sack of coal is
signed for like a can of oil, not out of distrust, but because the winter is longer than memory.

11. Visitors. Visitors are shown the gauge and the lamp and are given tea. They do not touch the
wheels. Children hold somebody's hand on the wall. A visitor who asks to see the long drawer may see
it, with a person from the station beside them, and may copy any sheet. Painters are welcome, and
are told about the ebb. Nobody is turned away in bad weather.

12. Illness. If one of the three falls ill, the other two stand watches of twelve hours for up to
three days. On the second day a hand goes to the harbour office for help, over the causeway at low
water. If two of the three are ill, the sluice is left to the tide engine, the lamp is kept, the
gauge is kept if it can be, and one red flag is flown. One red flag means: come when you can. Two
red flags mean: come now.

13. Ice. When there is ice on the river, Mill is kept one hand-width open by day and by night, so
that the floes can leave. Ice in the gauge pipe is melted with a kettle, from above, slowly. The
bells are covered with sacking, because a frozen bell cracks at the first stroke; the sacking is
taken off before the bell is rung, which is why the person who rings brings a knife.

14. Changing this handbook. Anybody at the station may propose a change, by writing it on a sheet of
its own with the reason. The keeper reads the sheets on the last day of the year. A change that
would have helped in something that happened is taken first. What is taken out is copied into the
back of the book, with the year, since what was once thought necessary may be so again.
"""
