"""Stories of hobbies, school, and places that people visit."""

from codd.training.problems.story import Story, event, opening, story
from codd.training.problems.world import BAKED, FRIENDS, PERSON_FACTS, PLACE_FACTS, TOYS

COLLECTION = story(
    "collection",
    [
        opening("things", "start", "{name} has {n} {things}. | {name} collects {things} and owns {n} of them. | There "
                "are {n} {things} in {name}'s collection.", low=8, high=600),
        opening("things", "groups", "{name} keeps {his} {things} in {k} drawers, with {m} {things} in each drawer. | "
                "{name} has {k} boxes of {things}. Every box has {m} {things} in it.", "{name} has {e} {things}. | "
                "That is {e} {things}.", low=4, high=70),
    ],
    [
        event("things", "add", "{then}{friend} gives {him} {n} more {things}. | {who} gets {n} {things} for {his} "
              "birthday. | {then}{who} buys another {n} {things}.", "Now {name} has {e} {things}. | With the new ones, "
              "{name} has {e} {things}."),
        event("things", "add groups", "{then}{who} buys {k} packs of {m} {things}. | {k} {friends} give {him} {m} "
              "{things} each.", "That is {d} new {things}.\nNow {name} has {e} {things}. | {name} gets {d} "
              "{things}.\nThat makes {e} {things}.", high=20),
        event("things", "sub", "{who} loses {n} of the {things} on a trip. | {then}{who} trades {n} {things} for a "
              "book.", "Then {name} has {e} {things}. | That leaves {e} {things}."),
        event("things", "sub groups", "{then}{who} gives {m} {things} to each of {k} {friends}. | {k} {friends} each "
              "buy {m} {things} from {him}.", "They get {d} {things}.\n{name} has {e} {things} left. | That is {d} "
              "{things}.\nSo {name} still has {e} {things}.", high=20),
        event("things", "cut", "{then}{who} gives {part} of the {things} {he} now has to {friend}. | {who} sells "
              "{part} of all the {things} {he} has at that time.", "{name} parts with {d} {things}.\n{name} keeps {e} "
              "{things}. | That is {d} {things}.\nThen {e} {things} are left."),
        event("things", "mul", "A year later, {who} has {times} as many {things} as that. | By next summer, {his} "
              "collection has grown to {times} that number of {things}.", "{name} then has {e} {things}. | The "
              "collection grows to {e} {things}.", high=5),
        event("things", "div", "{who} arranges all the {things} {he} now has in {k} equal rows. | {who} puts all {his} "
              "{things} into {k} albums, the same number in each.", "Each one has {e} {things}. | That makes {e} "
              "{things} in each.", to="row"),
        event("things", "reach", "{who} would like to have {n} {things}. | {his} goal is a collection of {n} {things}.",
              "{name} still needs {e} {things}. | To reach the goal, {e} {things} are missing.", to="goal"),
        event("things", "sub", "{name}'s sister has {n} {things} at that time. | At this point, {his} sister has only "
              "{n} {things}.", "{name} has {e} more {things} than {his} sister. | The difference is {e} {things}.",
              to="ahead"),
    ],
    {
        "things": "How many {things} does {name} have after all this? | How many {things} does {name} have in the end?",
        "row": "How many {things} are in each of them? | How many {things} does {name} put in each one?",
        "goal": "How many more {things} does {name} need? | How many {things} are still missing?",
        "ahead": "How many more {things} than {his} sister does {name} have? | By how many {things} is {name} ahead of "
        "{his} sister?",
    },
    PERSON_FACTS,
    things=TOYS,
    friends=FRIENDS,
)  # fmt: skip

LIBRARY = story(
    "library",
    [
        opening("books", "start", "A small library has {n} books on its shelves. | There are {n} books in the school "
                "library.", low=60, high=800),
        opening("books", "groups", "A library room has {k} shelves with {m} books on each shelf. | The books of a new "
                "library fill {k} shelves, with {m} books to a shelf.", "There are {e} books. | The shelves hold {e} "
                "books.", low=12, high=80),
    ],
    [
        event("books", "sub", "On Monday, readers borrow {n} of the books. | {n} of the books are lent to a class.",
              "Then {e} books are in the library. | That leaves {e} books."),
        event("books", "add", "{then}readers bring back {n} books that had been out for weeks. | A family donates {n} "
              "books.", "Now the library has {e} books there. | That makes {e} books.", high=150),
        event("books", "add groups", "{then}the library buys {k} sets of {m} books. | {k} boxes with {m} new books "
              "each arrive.", "These are {d} books.\nThe number rises to {e} books. | {d} books are added.\nThen there "
              "are {e} books.", high=25),
        event("books", "sub groups", "{then}{k} children borrow {m} books each. | {m} books are sent to each of {k} "
              "villages.", "That is {d} books.\n{e} books stay in the library. | {d} books leave.\nThe library has {e} "
              "books left.", high=15),
        event("books", "cut", "{part} of the books now in the library are old and are sold. | {then}{part} of the "
              "books still on the shelves are moved to a new building.", "That is {d} books.\n{e} books are left. | "
              "{d} books go.\nThe library keeps {e} books."),
        event("books", "div", "The librarian places all the books that are there now on {k} shelves, equally many on "
              "each. | All the books that are there now are spread evenly over {k} shelves.", "Each shelf gets {e} "
              "books. | That is {e} books for each shelf.", to="shelf"),
        event("books", "div", "{k} helpers check all the books that are now in the library, and each of them checks "
              "the same number.", "Each helper checks {e} books.", to="helper"),
    ],
    {
        "books": "How many books are in the library now? | How many books does the library have there at the end?",
        "shelf": "How many books are on each shelf? | How many books does each shelf get?",
        "helper": "How many books does one helper check?",
    },
    (
        *PLACE_FACTS,
        ("The library also has {n} chairs.", 13, 120),
    ),
)  # fmt: skip

READING = story(
    "reading",
    [
        opening("left", "start", "{name} starts a book of {n} pages. | {name} has to read a novel with {n} pages.",
                low=90, high=700),
        opening("left", "groups", "{name} wants to read a book with {k} chapters of {m} pages each. | A book has {k} "
                "chapters, each {m} pages long. {name} begins to read it.", "The book has {e} pages. | In all there "
                "are {e} pages.", low=12, high=70),
    ],
    [
        event("left", "sub", "On the first day, {who} reads {n} pages. | {who} reads {n} pages on a train ride.",
              "Then {e} pages are left. | {name} has {e} pages to go."),
        event("left", "sub", "At bedtime {who} reads {n} pages. | During a rainy afternoon, {who} gets through {n} "
              "pages.", "After that, {e} pages are left. | Now {e} pages remain.", high=99),
        event("left", "sub groups", "{then}{who} reads {m} pages a day for {k} days. | For {k} evenings {who} reads "
              "{m} pages every evening.", "That is {d} pages.\n{name} still has {e} pages to read. | {name} reads {d} "
              "pages.\nSo {e} pages are left.", high=30),
        event("left", "cut", "Over the weekend, {who} reads {part} of the pages {he} has not read so far. | "
              "{then}{who} reads {part} of the pages {he} has not read yet.", "{name} reads {d} pages.\nThen {e} pages "
              "are left. | That is {d} pages.\nSo {e} pages are still unread."),
        event("left", "div", "{who} wants to finish the rest in {k} days, reading the same number of pages each day. | "
              "{who} divides the pages that are left evenly over {k} days.", "{name} must read {e} pages a day. | That "
              "makes {e} pages a day.", to="daily"),
        event("left", "div", "{who} will read {k} pages every day from now on. | From then on {who} reads {k} pages a "
              "day.", "The rest takes {e} days. | {name} needs {e} days.", to="days"),
        event("left", "mul", "Each of the pages still left takes {him} {k} minutes. | {who} needs {k} minutes for each "
              "page that is left.", "The rest takes {e} minutes. | {name} reads for {e} minutes.", to="minutes"),
    ],
    {
        "left": "How many pages are left? | How many pages does {name} still have to read?",
        "daily": "How many pages does {name} have to read each day? | How many pages is that per day?",
        "days": "How many days does {name} need to finish the book? | After how many more days is the book finished?",
        "minutes": "How many minutes does {name} need for the rest of the book?",
    },
    (
        *PERSON_FACTS,
        ("The book was a gift from {name}'s {n}-year-old neighbor.", 20, 80),
        ("The book weighs {n} ounces.", 6, 40),
    ),
)  # fmt: skip

CLASSROOM = story(
    "classroom",
    [
        opening("supply", "groups", "A teacher named {name} buys {k} packs of {things} with {m} {things} in each pack. "
                "| In {name}'s classroom there are {k} boxes, and each box has {m} {things}.", "There are {e} "
                "{things}. | {name} has {e} {things}.", low=5, high=60),
        opening("supply", "pair", "{name}, a teacher, has {n} new {things} and {m} used {things}.", "Altogether {name} "
                "has {e} {things}. | That is {e} {things} in total.", low=5, high=200),
    ],
    [
        event("supply", "sub groups", "{then}each of {k} children gets {m} {things}. | {name} gives {k} groups of "
              "children {m} {things} each.", "The children get {d} {things}.\n{name} has {e} {things} left. | That is "
              "{d} {things}.\nThen {e} {things} remain.", high=12),
        event("supply", "sub", "{n} of the {things} are broken and thrown away. | {who} lends {n} {things} to another "
              "class.", "{e} {things} are left. | Then there are {e} {things}.", high=60),
        event("supply", "add", "{then}the parents bring {n} more {things}. | {who} finds {n} {things} in a cupboard "
              "and adds them.", "Now there are {e} {things}. | Together that makes {e} {things}.", high=150),
        event("supply", "cut", "{then}{who} gives {part} of the {things} {he} now has to another school. | {part} of "
              "the {things} that {name} now has are given to the art room.", "That is {d} {things}.\n{e} {things} are "
              "left for {name}'s class. | {d} {things} go away.\nThen {e} {things} remain."),
        event("supply", "div", "{who} divides all the {things} {he} has left equally among {k} tables. | {who} lays "
              "out all the {things} {he} now has on {k} tables, equally many on each table.", "Each table gets {e} "
              "{things}. | That is {e} {things} for each table.", to="each"),
        event("supply", "div", "{who} gives {k} of the {things} that are left to each child until none are left. | All "
              "the {things} that are there now are handed out, {k} to each child.", "There are {e} children. | That is "
              "enough for {e} children.", to="children"),
    ],
    {
        "supply": "How many {things} does {name} have now? | How many {things} are left in the classroom?",
        "each": "How many {things} are on each table? | How many {things} does each table get?",
        "children": "How many children get {k} {things} each? | How many children receive {k} {things} each?",
    },
    (
        *PERSON_FACTS,
        ("The classroom has {n} posters on its walls.", 4, 40),
        ("{name} has been a teacher for {n} years.", 3, 40),
    ),
    things="pencils,crayons,markers,notebooks,rulers,brushes,glue sticks,folders",
)  # fmt: skip

MUSEUM = story(
    "museum_visitors",
    [
        opening("inside", "start", "In the morning, {n} people enter {place}. | {n} people are in {place} at ten "
                "o'clock.", low=15, high=500),
        opening("inside", "groups", "{k} tour groups of {m} people each enter {place}. | {k} buses with {m} people "
                "each stop at {place}, and all of the people go in.", "Together they are {e} people. | That makes {e} "
                "people.", low=8, high=55),
        opening("inside", "pair", "{n} adults and {m} children enter {place}.", "There are {e} people inside.", low=5,
                high=200),
    ],
    [
        event("inside", "add", "{then}{n} more people come in. | A school brings {n} more people.", "Now {e} people "
              "are inside. | The number rises to {e} people.", high=200),
        event("inside", "sub", "{n} of them leave before lunch. | {then}{n} people go home.", "Then {e} people are "
              "still inside. | That leaves {e} people inside."),
        event("inside", "add groups", "{then}{k} families of {m} arrive. | {k} vans bring {m} more people each.",
              "That is {d} people.\nNow {e} people are inside. | {d} people arrive.\nSo there are {e} people inside.",
              high=12),
        event("inside", "cut", "{then}{part} of the people who are inside at that time leave. | When it starts to "
              "rain, {part} of the people inside decide to go home.", "{d} people leave.\nThen {e} people are left. | "
              "That is {d} people.\nSo {e} people stay."),
        event("inside", "div", "The people who are inside now are led around in groups of {k}. | All of the people who "
              "are still there form groups of {k}.", "They form {e} groups. | That gives {e} groups.", to="groups"),
        event("inside", "mul", "Everyone who is inside now buys a souvenir for ${k}. | The people who are still there "
              "pay ${k} each for a special show.", "They pay {e} dollars. | That brings in {e} dollars.", to="income"),
        event("groups", "mul", "Each group pays its guide ${k}. | Every group gives ${k} to a charity box.", "The "
              "groups pay {e} dollars. | In total that is {e} dollars.", to="income"),
    ],
    {
        "inside": "How many people are inside now? | How many people are still inside at the end?",
        "groups": "How many groups are there? | How many groups do the visitors form?",
        "income": "How many dollars is that in total? | How much money, in dollars, do they pay altogether?",
    },
    (
        *PLACE_FACTS,
        ("A ticket is valid for {n} days.", 3, 90),
    ),
    place="a museum,a zoo,an aquarium,a castle,a science center,a botanical garden,an art gallery",
)  # fmt: skip

PARTY = story(
    "party_baking",
    [
        opening("food", "groups", "For a party, {name} bakes {k} batches of {m} {things}. | {name} makes {things} for "
                "a party and gets {m} {things} from each of {k} pans.", "{name} bakes {e} {things}. | In all, {e} "
                "{things} are made.", low=5, high=48),
        opening("food", "start", "{name} bakes {n} {things} for a party. | For {his} party, {name} orders {n} "
                "{things}.", low=12, high=250),
    ],
    [
        event("food", "sub", "{his} brothers eat {n} {things} before the party. | {who} drops {n} of the {things} on "
              "the floor and throws them away.", "That leaves {e} {things}. | Then there are {e} {things}.", high=40),
        event("food", "add", "{then}{friend} arrives with {n} more {things}. | A neighbor brings another {n} {things}.",
              "Now there are {e} {things}. | That makes {e} {things}.", high=90),
        event("food", "sub groups", "{then}{k} guests eat {m} {things} each. | Each of the {k} guests who come first "
              "takes {m} of the {things}.", "The guests eat {d} {things}.\n{e} {things} are left. | That is {d} "
              "{things}.\nSo there are {e} {things} left.", high=6),
        event("food", "cut", "{then}{who} puts icing on {part} of the {things} that are there now and leaves the "
              "others plain. | {who} adds nuts to {part} of the {things} {he} now has and leaves the others plain.",
              "{d} {things} get a topping.\nThe other {e} {things} are plain.", to="plain"),
        event("food", "div", "At the end {who} divides all the {things} that are left equally among {k} {friends}. | "
              "All of the {things} that are there now are put on {k} plates, the same number on each plate.", "Each "
              "gets {e} {things}. | That makes {e} {things} each.", to="each"),
        event("plain", "div", "All the plain {things} that are there at the end are divided equally among {k} "
              "children. | {k} children then share all the plain {things} that are left equally.", "Each child gets "
              "{e} plain {things}. | One child gets {e} plain {things}.", to="child"),
        event("plain", "sub", "{then}the guests eat {n} of the plain {things}. | {n} of the plain {things} are given "
              "to {friend}.", "There are {e} plain {things} left. | That leaves {e} plain {things}."),
        event("food", "mul", "Each of the {things} that are there now is decorated with {k} nuts. | {who} puts {k} "
              "nuts on each of the {things} that are there now.", "{name} needs {e} nuts for this. | That takes {e} "
              "nuts in all.", to="nuts"),
    ],
    {
        "food": "How many {things} are there now? | How many {things} are left?",
        "plain": "How many plain {things} are there in the end? | How many plain {things} are left?",
        "each": "How many {things} is that for each one of the {k}?",
        "child": "How many plain {things} does each child get?",
        "nuts": "How many nuts does {name} need? | How many nuts are on the {things} altogether?",
    },
    (
        *PERSON_FACTS,
        ("{name} blows up {n} balloons for the party.", 15, 120),
        ("The party is {n} days before {name}'s birthday.", 3, 40),
    ),
    things=BAKED,
    friends=FRIENDS,
)  # fmt: skip

BLOCKS = story(
    "building_blocks",
    [
        opening("free", "start", "{name} has a box with {n} building blocks. | There are {n} wooden blocks on {name}'s "
                "floor.", low=30, high=700),
        opening("free", "groups", "{name} opens {k} bags of building blocks, and each bag has {m} blocks. | {name} has "
                "building blocks in {k} colors, and {m} blocks of each color.", "{name} has {e} blocks. | There are "
                "{e} blocks.", low=10, high=80),
    ],
    [
        event("free", "sub groups", "{who} builds {k} towers with {m} blocks each. | {then}{who} uses {m} blocks for "
              "each of {k} houses.", "This takes {d} blocks.\n{name} has {e} blocks left. | {name} uses {d} "
              "blocks.\nSo {e} blocks are unused.", high=30),
        event("free", "sub", "{who} uses {n} of the blocks for a bridge. | {then}{who} builds a castle out of {n} "
              "blocks.", "Then {e} blocks are left. | That leaves {e} unused blocks."),
        event("free", "add", "{friend} brings {n} more blocks. | {then}{who} gets {n} new blocks.", "Now {name} has "
              "{e} free blocks. | That makes {e} free blocks.", high=200),
        event("free", "cut", "{then}{who} gives {part} of the unused blocks to {friend}. | {then}{who} builds a long "
              "wall out of {part} of the blocks that are still unused.", "That is {d} blocks.\n{e} blocks are left. | "
              "This takes {d} blocks.\nSo {e} blocks are still unused."),
        event("free", "div", "{who} uses all the blocks {he} now has free for {k} equally large cars. | {who} stacks "
              "all the blocks that are still unused in {k} equal piles.", "Each has {e} blocks. | That is {e} blocks "
              "for each.", to="each"),
        event("free", "div", "With all the blocks {he} now has free, {who} builds small boats out of {k} blocks each. "
              "| The blocks that are unused now become small boats, {k} blocks to a boat.", "{name} builds {e} boats. "
              "| That is enough for {e} boats.", to="boats"),
        event("boats", "sub", "{then}{n} of the boats fall apart. | {who} gives {n} of the boats to {friend}.", "Then "
              "{e} boats are left. | {name} still has {e} boats.", high=40),
        event("boats", "mul", "{who} puts {k} toy sailors in every boat {he} now has. | Each boat that is there gets "
              "{k} toy sailors.", "The boats carry {e} sailors. | {name} needs {e} sailors.", to="sailors"),
    ],
    {
        "free": "How many blocks are not used now? | How many unused blocks does {name} have at the end?",
        "each": "How many blocks are in each of them? | How many blocks does each one have?",
        "boats": "How many boats does {name} have? | How many boats are there in the end?",
        "sailors": "How many toy sailors are in the boats?",
    },
    (
        *PERSON_FACTS,
        ("The rug in {name}'s room is {n} inches long.", 31, 99),
    ),
)  # fmt: skip

STORIES: tuple[Story, ...] = (COLLECTION, LIBRARY, READING, CLASSROOM, MUSEUM, PARTY, BLOCKS)
