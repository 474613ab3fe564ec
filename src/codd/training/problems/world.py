"""The words of the stories: people, objects, number words, and facts that have nothing to do with the question."""


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
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
TOYS = words(
    "marbles,stickers,trading cards,toy cars,stamps,coins,seashells,buttons,comic books,postcards,beads,"
    "action figures,crayons,keychains,puzzle pieces,badges,toy soldiers,pebbles,erasers,bottle caps"
)
FRUIT = words("apples,oranges,pears,peaches,plums,lemons,mangoes,melons,apricots,bananas,limes,kiwis")
VEGETABLES = words("carrots,tomatoes,cabbages,onions,potatoes,pumpkins,peppers,beets,turnips,leeks")
BAKED = words("muffins,cookies,bread rolls,cupcakes,bagels,donuts,scones,pretzels,croissants,brownies")
FLOWERS = words("roses,tulips,daisies,lilies,sunflowers,carnations,orchids,daffodils")
FISH = words("trout,salmon,perch,cod,herring")
FRIENDS = ("friends", "cousins", "classmates", "neighbors")

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

# Each with the range of its number; the number is drawn so that it occurs nowhere else in the problem.
Fact = tuple[str, int, int]
PERSON_FACTS: tuple[Fact, ...] = (
    ("{name} lives at {n} {street} Street.", 2, 240),
    ("{name} is {n} years old.", 19, 78),
    ("It is {n} degrees outside that day.", 11, 95),
    ("The drive to {name}'s grandparents takes {n} minutes.", 12, 95),
    ("{name} lives {n} miles from the nearest airport.", 3, 90),
    ("{name}'s phone battery is at {n} percent.", 13, 97),
    ("{name} has lived in the same town for {n} years.", 3, 40),
    ("{name} is {n} centimeters tall.", 141, 198),
    ("{name} woke up {n} minutes before the alarm that morning.", 3, 58),
    ("{name}'s favorite number is {n}.", 3, 99),
)
PLACE_FACTS: tuple[Fact, ...] = (
    ("It is {n} degrees outside that day.", 11, 95),
    ("The nearest train station is {n} minutes away on foot.", 3, 55),
    ("The building is {n} years old.", 13, 190),
    ("The address is {n} {street} Street.", 2, 240),
    ("The manager is {n} years old.", 28, 66),
    ("The building has {n} windows.", 5, 90),
    ("A bus stops in front of the building every {n} minutes.", 4, 45),
)
