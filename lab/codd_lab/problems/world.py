"""Words that all stories share: people, purchases, number words."""


def words(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(text.split(","))


FEMALE = words(
    "Mia,Ana,Emma,Olivia,Sofia,Lena,Clara,Nora,Ruth,Ivy,Grace,Hannah,Zoe,Lucy,Maya,Priya,Fatima,Aisha,Yuki,Mei,"
    "Elena,Carmen,Rosa,Ingrid,Freya,Astrid,Chloe,Alice,Julia,Laura,Megan,Naomi,Paula,Quinn,Rachel,Sarah,Tara,Uma,"
    "Vera,Wendy,Yara,Zara,Amara,Bella,Diana,Esther,Gloria,Helen,Irene,Jane,Kate,Linda"
)
MALE = words(
    "Ben,Tom,Sam,Leo,Max,Noah,Liam,Omar,Ravi,Kenji,Diego,Mateo,Luis,Pedro,Hugo,Oscar,Felix,Anton,Boris,Carl,David,"
    "Ethan,Frank,George,Henry,Isaac,Jack,Kevin,Lucas,Martin,Nathan,Owen,Paul,Rob,Simon,Tim,Victor,Walter,Xavier,"
    "Yusuf,Adam,Brian,Chris,Daniel,Eric,Finn,Gabriel,Hassan,Ivan,James,Karl,Jamal"
)
BUYS = (
    "a jacket,groceries,a new lamp,a pair of shoes,a birthday present,school supplies,a cookbook,a concert ticket,"
    "paint,a train ticket,a new backpack,a pair of headphones"
)
GOALS = "a bicycle,a tent,a guitar,a camera,a telescope,a sewing machine,a kayak,a keyboard,a desk,a tablet"
STREETS = ("Maple", "Oak", "Hill", "Park", "River", "Church", "Mill", "Station", "Garden", "Lake")
SHARED_VOCABULARY: dict[str, tuple[str, ...]] = {
    "buy": words(BUYS),
    "goal": words(GOALS),
    "street": STREETS,
}

NUMBER_WORDS = ("", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth", 10: "a tenth"}
TIMES = ("", "", "twice", *(f"{word} times" for word in NUMBER_WORDS[3:]))

Fact = tuple[str, int, int]
"""A distractor with the range of its number, which is drawn so that it occurs nowhere else in the problem."""
