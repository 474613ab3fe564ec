"""Stories that compare people, days or places with each other."""

from codd.training.problems.openings import comparison, in_order, people, shuffled
from codd.training.problems.story import Story, event, story
from codd.training.problems.world import FRUIT, TOYS, Fact

DAYS = in_order("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = in_order("March", "April", "May", "June", "July", "August", "September", "October")
PEOPLE_FACTS: tuple[Fact, ...] = (
    ("{first} lives at {n} {street} Street.", 2, 240),
    ("{first} is {n} centimeters tall.", 121, 198),
    ("{first}'s favorite number is {n}.", 3, 99),
    ("{first} lives {n} miles from the nearest lake.", 3, 60),
    ("{first} has lived in the same town for {n} months.", 13, 90),
    ("It is {n} degrees outside that day.", 11, 95),
)
TOWN_FACTS: tuple[Fact, ...] = (
    ("The nearest airport is {n} miles away.", 5, 120),
    ("The mayor of the town is {n} years old.", 31, 75),
    ("The town hall has {n} windows.", 14, 160),
    ("The local newspaper has {n} pages.", 8, 48),
)

TOY_COMPARISON = story(
    "compared_collections",
    [
        comparison(people, "{b} has {n} {things}. | {b} owns {n} {things}.", "{b} has {e} {things}. | That means that "
                   "{b} has {e} {things}.", "{a} and {b} together have {e} {things}. | {a} and {b} have {e} {things} "
                   "between them.", "With {c}, that makes {e} {things}. | Adding the {things} of {c} gives {e} "
                   "{things}.", more="{b} has {n} more {things} than {a}. | {b} owns {n} more {things} than {a}.",
                   fewer="{b} has {n} fewer {things} than {a}. | {b} owns {n} fewer {things} than {a}.", times="{b} "
                   "has {times} as many {things} as {a}. | {b} owns {times} as many {things} as {a}.", part="{b} has "
                   "{part} as many {things} as {a}. | {b} owns {part} as many {things} as {a}."),
    ],
    [
        event("total", "div", "They put all of their {things} together and divide them equally among {k} boxes. | All "
              "of their {things} are put into {k} boxes, the same number in each box.", "Each box gets {e} {things}. | "
              "That is {e} {things} in each box.", to="box"),
        event("total", "reach", "Together they want to own {n} {things}. | As a group they hope to own {n} {things} in "
              "all.", "They still need {e} {things}. | {e} {things} are missing.", to="goal"),
        event("total", "sub", "Then they give {n} of all their {things} to a school. | They lose {n} of their {things} "
              "on a trip.", "Together they then have {e} {things}. | That leaves {e} {things} for all of them."),
        event("last", "div", "{b}'s {things} are kept in {k} bags, the same number in each bag. | {b} puts all these "
              "{things} into {k} equal bags.", "Each bag holds {e} {things}. | That is {e} {things} in each bag.",
              to="bag"),
    ],
    {
        "total": "How many {things} do they have altogether? | How many {things} is that in all?",
        "last": "How many {things} does {b} have? | How many {things} is that for {b}?",
        "difference": "How many more {things} does {x} have than {y}? | What is the difference between the numbers of "
        "{things} that {x} and {y} have?",
        "box": "How many {things} are in each box?",
        "goal": "How many more {things} do they need?",
        "bag": "How many {things} are in each bag?",
    },
    PEOPLE_FACTS,
    things=TOYS,
)  # fmt: skip

AGES = story(
    "ages",
    [
        comparison(people, "{b} is {n} years old. | This year, {b} turned {n} years old.", "{b} is {e} years old. | So "
                   "{b}'s age is {e} years.", "The ages of {a} and {b} add up to {e} years. | Together {a} and {b} are "
                   "{e} years old.", "Adding the age of {c} gives {e} years. | With {c}, the sum is {e} years.",
                   more="{b} is {n} years older than {a}.", fewer="{b} is {n} years younger than {a}.", times="{b} is "
                   "{times} as old as {a}.", part="{b} is {part} as old as {a}. | {a}'s age is {k} times {b}'s age.",
                   low=4, high=60, limit=90),
    ],
    [
        event("total", "mul", "For each year of all their ages together, ${k} is given to a hospital. | A rich uncle "
              "pays ${k} for every year of the sum of their ages.", "That is {e} dollars. | In all, {e} dollars are "
              "paid.", to="gift"),
        event("last", "add", "Think of the time {n} years from now. | Now imagine that {n} years go by.", "In {n} "
              "years {b} will be {e} years old. | {b} will then be {e} years old.", to="later", high=30, limit=110),
    ],
    {
        "total": "What is the sum of their ages, in years? | How many years do all their ages add up to?",
        "last": "How old is {b}? | How many years old is {b}?",
        "difference": "How many years older than {y} is {x}? | What is the age difference between {x} and {y}, in "
        "years?",
        "gift": "How many dollars is that in all?",
        "later": "How old will {b} be then?",
    },
    PEOPLE_FACTS[:4],
)  # fmt: skip

SALES_DAYS = story(
    "sales_by_day",
    [
        comparison(DAYS, "On {b}, a shop sells {n} {things}. | A store sells {n} {things} on {b}.", "On {b} the shop "
                   "sells {e} {things}. | The number for {b} is {e} {things}.", "On {a} and {b} together it sells {e} "
                   "{things}. | {a} and {b} make {e} {things}.", "With {c}, that is {e} {things}. | Adding {c} gives "
                   "{e} {things}.", more="On {b} it sells {n} more {things} than on {a}.", fewer="On {b} it sells {n} "
                   "fewer {things} than on {a}.", times="On {b} it sells {times} as many {things} as on {a}.",
                   part="On {b} it sells {part} as many {things} as on {a}."),
    ],
    [
        event("total", "mul", "Each of the {things} costs ${k}. | The price of each one is ${k}.", "The shop takes in "
              "{e} dollars. | All these sales are worth {e} dollars.", to="income"),
        event("last", "mul", "Each of the {things} costs ${k}. | The price of each one is ${k}.", "On {b} the shop "
              "takes in {e} dollars.", to="day"),
        event("total", "sub", "Later, customers return {n} of all these {things}. | Customers return {n} of the "
              "{things} sold on these days.", "{e} {things} are not returned. | The customers keep {e} {things}.",
              to="kept"),
        event("income", "sub", "The shop has to pay ${n} for rent out of this money. | The workers get ${n} of this "
              "money.", "Then {e} dollars are left. | The shop keeps {e} dollars."),
    ],
    {
        "total": "How many {things} is that in total, for all of these days? | How many {things} are sold in all?",
        "kept": "How many of the {things} do the customers keep? | How many of these {things} are not returned?",
        "last": "How many {things} are sold on {b}? | How many {things} does it sell on {b}?",
        "difference": "How many more {things} are sold on {x} than on {y}?",
        "income": "How many dollars does the shop have from these sales in the end? | How much money, in dollars, does "
        "the shop make with these sales?",
        "day": "How much money, in dollars, does the shop take in on {b}? | How many dollars are paid on {b}?",
    },
    TOWN_FACTS,
    things="kites,lamps,scarves,hats,candles,cakes,mugs,notebooks,toy boats,umbrellas",
)  # fmt: skip

VISITORS = story(
    "visitors_by_month",
    [
        comparison(MONTHS, "In {b}, {place} has {n} visitors. | {n} people visit {place} in {b}.", "In {b} there are "
                   "{e} visitors. | That means {e} visitors in {b}.", "In {a} and {b} together there are {e} visitors. "
                   "| {a} and {b} have {e} visitors in all.", "With {c}, there are {e} visitors. | Adding {c} gives "
                   "{e} visitors.", more="In {b} it has {n} more visitors than in {a}. | There are {n} more visitors "
                   "in {b} than in {a}.", fewer="In {b} it has {n} fewer visitors than in {a}. | There are {n} fewer "
                   "visitors in {b} than in {a}.", times="In {b} it has {times} as many visitors as in {a}.", part="In "
                   "{b} it has {part} as many visitors as in {a}.", low=12, high=200),
    ],
    [
        event("total", "part", "{part} of all these visitors are children. | Of all the visitors in these months, "
              "{part} are children.", "{e} of the visitors are children. | The number of children is {e}.", to="group"),
        event("total", "cut", "{part} of all these visitors are children, and the others are adults.", "{d} of the "
              "visitors are children.\nSo {e} of them are adults.", to="adults"),
        event("last", "div", "In {b}, all visitors are shown around in groups of {k}. | The visitors in {b} come in "
              "groups of {k}.", "In {b} there are {e} groups. | That makes {e} groups.", to="tours"),
        event("adults", "mul", "Each adult pays ${k}, and children pay nothing. | Only adults have to pay, and a "
              "ticket costs ${k}.", "The adults pay {e} dollars. | That brings in {e} dollars.", to="income"),
    ],
    {
        "total": "How many visitors is that in total, in all these months? | How many visitors are there in all of "
        "these months together?",
        "last": "How many visitors are there in {b}? | How many people come in {b}?",
        "difference": "How many more visitors are there in {x} than in {y}?",
        "group": "How many of the visitors are children? | How many children come in all?",
        "adults": "How many of the visitors are adults?",
        "tours": "How many groups are there in {b}?",
        "income": "How many dollars do the visitors pay in all?",
    },
    TOWN_FACTS,
    place="a small museum,a lighthouse,a castle,a cave,a mountain hut,a windmill,an old mine",
)  # fmt: skip

PICKING = story(
    "picking_contest",
    [
        comparison(people, "{b} picks {n} {things}. | In an hour, {b} picks {n} {things}.", "{b} picks {e} {things}. | "
                   "So {b} has {e} {things}.", "{a} and {b} pick {e} {things} together. | Together, {a} and {b} have "
                   "{e} {things}.", "With the {things} of {c}, there are {e}. | Adding {c} makes {e} {things}.",
                   more="{b} picks {n} more {things} than {a}. | {b} manages to pick {n} more {things} than {a}.",
                   fewer="{b} picks {n} fewer {things} than {a}.", times="{b} picks {times} as many {things} as {a}.",
                   part="{b} picks {part} as many {things} as {a}."),
    ],
    [
        event("total", "div", "They put all the {things} they now have into baskets of {k}. | All the {things} they "
              "now have go into baskets, {k} to a basket.", "They fill {e} baskets. | That takes {e} baskets.",
              to="baskets"),
        event("baskets", "mul", "Each basket is sold for ${k}. | They get ${k} for every basket.", "They get {e} "
              "dollars. | The baskets bring in {e} dollars.", to="income"),
        event("total", "sub", "On the way home, they eat {n} of all these {things}. | {n} of all their {things} are "
              "not ripe and are thrown away.", "Then there are {e} {things}. | {e} {things} are left.", high=60),
    ],
    {
        "total": "How many {things} do they have altogether in the end? | How many {things} are there in all, at the "
        "end?",
        "last": "How many {things} does {b} pick?",
        "difference": "How many more {things} does {x} pick than {y}?",
        "baskets": "How many baskets do they fill?",
        "income": "How many dollars do they get?",
    },
    PEOPLE_FACTS,
    things=FRUIT,
)  # fmt: skip

SCORES = story(
    "sports_points",
    [
        comparison(people, "In a {sport} game, {b} scores {n} points. | {b} plays {sport} and scores {n} points in a "
                   "game.", "{b} scores {e} points. | That gives {b} {e} points.", "{a} and {b} score {e} points "
                   "together. | Together, {a} and {b} have {e} points.", "With {c}, the team has {e} points. | Adding "
                   "{c} makes {e} points.", more="{b} scores {n} more points than {a}. | {b} gets {n} points more than "
                   "{a}.", fewer="{b} scores {n} fewer points than {a}. | {b} gets {n} points less than {a}.",
                   times="{b} scores {times} as many points as {a}.", part="{b} scores {part} as many points as {a}.",
                   low=4, high=40, limit=120),
    ],
    [
        event("total", "sub", "They make up one team and nobody else scores for it. The other team has {n} points. | "
              "These are all the points of their team, and their opponents have only {n} points.", "They win by {e} "
              "points. | Their team is ahead by {e} points.", to="lead"),
        event("total", "add", "For good behavior they get {n} extra points as a team. | The judges give the whole "
              "group a bonus of {n} points.", "With the bonus, they have {e} points. | Then they have {e} points.",
              high=40),
        event("total", "mul", "A fan gives ${k} to a charity for every point they have in all. | For each point they "
              "have together, their school gets ${k}.", "That is {e} dollars. | {e} dollars are given.", to="gift"),
    ],
    {
        "total": "How many points do they have altogether? | What is the total number of their points?",
        "last": "How many points does {b} score?",
        "difference": "How many more points does {x} score than {y}?",
        "lead": "By how many points does their team lead?",
        "gift": "How many dollars is that?",
    },
    PEOPLE_FACTS,
    sport="basketball,handball,rugby,darts,volleyball",
)  # fmt: skip

CLASSES = story(
    "school_classes",
    [
        comparison(shuffled("Oak School", "Lake School", "Hill School", "River School", "Park School", "Forest School"),
                   "{b} has {n} students. | There are {n} students at {b}.", "{b} has {e} students. | So there are {e} "
                   "students at {b}.", "{a} and {b} together have {e} students. | There are {e} students at {a} and "
                   "{b} together.", "With {c}, that is {e} students. | Adding {c} gives {e} students.", more="{b} has "
                   "{n} more students than {a}.", fewer="{b} has {n} fewer students than {a}.", times="{b} has {times} "
                   "as many students as {a}.", part="{b} has {part} as many students as {a}.", low=20, high=220),
    ],
    [
        event("total", "div", "For a sports day, all these students form teams of {k}. | All of these students are put "
              "in teams of {k}.", "They form {e} teams. | That gives {e} teams.", to="teams"),
        event("total", "sub", "Today, {n} of all these students are sick at home. The others come to a concert. | All "
              "of these students except {n} come to a concert.", "{e} students come to the concert.", to="concert"),
        event("concert", "div", "At the concert they sit in {k} equal rows. | They sit in {k} rows, the same number in "
              "each.", "Each row has {e} students. | That is {e} students in a row.", to="rows"),
        event("last", "div", "The students at {b} are in {k} classes of the same size. | At {b} there are {k} classes, "
              "and all of them are equally large.", "Each class at {b} has {e} students. | A class has {e} students.",
              to="class"),
    ],
    {
        "total": "How many students do these schools have altogether?",
        "last": "How many students does {b} have?",
        "difference": "How many more students does {x} have than {y}?",
        "teams": "How many teams are there?",
        "concert": "How many students come to the concert?",
        "rows": "How many students sit in each row?",
        "class": "How many students are in each class at {b}?",
    },
    TOWN_FACTS,
)  # fmt: skip

SAVERS = story(
    "compared_savings",
    [
        comparison(people, "{b} saves ${n}. | {b} has ${n} in the bank.", "{b} has {e} dollars. | That makes {e} "
                   "dollars for {b}.", "{a} and {b} together have {e} dollars. | The money of {a} and {b} makes {e} "
                   "dollars.", "With {c}, that is {e} dollars. | Adding the money of {c} gives {e} dollars.",
                   more="{b} has ${n} more than {a}.", fewer="{b} has ${n} less than {a}.", times="{b} has {times} as "
                   "much money as {a}.", part="{b} has {part} as much money as {a}.", low=8, high=200),
    ],
    [
        event("total", "sub", "They put all their money together and buy a gift for ${n}. | From all their money "
              "together, they pay ${n} for a trip.", "They have {e} dollars left together. | That leaves {e} dollars."),
        event("total", "reach", "Together they want to buy {goal} for ${n}. | With all the money they have together, "
              "they want to buy {goal} that costs ${n}.", "They need {e} more dollars. | {e} dollars are missing.",
              to="short"),
        event("total", "div", "With all the money they have together, they buy theater tickets for ${k} each. | Then "
              "they spend all of the money they have together on books that cost ${k} each.", "They can buy {e} of "
              "them. | The money is enough for {e} of them.", to="tickets"),
        event("last", "sub", "{b} then buys {buy} for ${n}. | {b} spends ${n} on {buy}.", "After that, {b} has {e} "
              "dollars. | {b} has {e} dollars left."),
        event("last", "div", "{b} gives all the money {b} has in equal parts to {k} friends.", "Each friend gets {e} "
              "dollars.", to="friend"),
    ],
    {
        "total": "How many dollars do they have together in the end? | How much money, in dollars, do they have "
        "altogether in the end?",
        "last": "How many dollars does {b} have in the end?",
        "difference": "How many more dollars does {x} have than {y}?",
        "short": "How many more dollars do they need?",
        "tickets": "How many of these can they buy?",
        "friend": "How many dollars does each friend get?",
    },
    PEOPLE_FACTS,
)  # fmt: skip

STORIES: tuple[Story, ...] = (TOY_COMPARISON, AGES, SALES_DAYS, VISITORS, PICKING, SCORES, CLASSES, SAVERS)
