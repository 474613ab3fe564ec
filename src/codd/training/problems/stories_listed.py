"""Stories that list several groups and sum them up."""

from codd.training.problems.openings import bill
from codd.training.problems.stories_trade import MONEY, MONEY_ASKS
from codd.training.problems.story import Story, event, story
from codd.training.problems.world import PERSON_FACTS, PLACE_FACTS

PAY_EVENTS = (
    event("total", "reach", "{who} pays with ${n}. | {who} has ${n} to pay with.", "{name} gets {e} dollars back. | "
          "The change is {e} dollars.", to="change"),
    event("total", "div", "{name} and some friends share the final cost equally, so that {k} people pay the same "
          "amount. | The final amount is split equally among {k} people.", "Each person pays {e} dollars. | One "
          "person's part is {e} dollars.", to="part"),
    event("total", "sub", "{who} has a coupon that takes ${n} off the total. | The seller takes ${n} off the total "
          "price.", "After the discount, it is {e} dollars. | {name} then has to pay {e} dollars.", high=60),
    event("total", "add", "The delivery costs another ${n}. | {who} also pays ${n} for gift wrap.", "With this, the "
          "total is {e} dollars. | That makes {e} dollars.", high=40),
    event("total", "add", "{who} also buys {buy} for ${n}. | On top of that, {who} pays ${n} for {buy}.", "Adding "
          "{buy}, the cost is {e} dollars. | The total rises to {e} dollars.", low=12, high=120),
)  # fmt: skip
PAY_ASKS = {
    "total": "How many dollars does {name} pay in total? | How much does {name} have to pay altogether, in dollars?",
    "change": "How many dollars does {name} have left after paying? | How much change, in dollars, does {name} get?",
    "part": "How many dollars does each person pay?",
}

SHOPPING = story(
    "shopping",
    [
        bill("At a store, {name} buys {list}. | {name} goes shopping and gets {list}.", "{k} {item} for ${m} each | "
             "{k} {item} at ${m} each", "notebooks,pens,T-shirts,mugs,candles,towels,pillows,plates,scarves,picture "
             "frames,caps,puzzles,spoons", "The {item} cost {d} dollars. | For the {item}, {name} pays {d} dollars.",
             "Together that is {e} dollars. | The sum is {e} dollars.", high=35),
    ],
    PAY_EVENTS,
    PAY_ASKS,
    (
        *PERSON_FACTS,
        ("The store is open {n} hours a week.", 30, 90),
        ("{name} walks {n} minutes to the store.", 3, 55),
    ),
)  # fmt: skip

POSTAGE = story(
    "post_office",
    [
        bill("{name} sends {list} at the post office. | At the post office, {name} mails {list}.", "{k} {item} at ${m} "
             "each | {k} {item} for ${m} each", "letters,small parcels,large parcels,postcards,heavy boxes,express "
             "letters,flat packages", "The {item} cost {d} dollars. | Sending the {item} costs {d} dollars.", "In all "
             "that is {e} dollars. | Adding up gives {e} dollars.", high=18),
    ],
    (
        *PAY_EVENTS[:2],
        event("total", "add", "{who} also buys stamps for ${n}. | On top of that, {who} pays ${n} for stamps.",
              "Adding the stamps, the cost is {e} dollars. | The total rises to {e} dollars.", high=90),
        event("total", "sub", "{who} has a voucher that lowers the cost by ${n}. | {who} gets a discount of ${n} on "
              "all of this.", "Then {name} has to pay {e} dollars. | The rest is {e} dollars.", high=60),
    ),
    PAY_ASKS,
    (
        *PERSON_FACTS,
        ("There are {n} people in line in front of {name}.", 3, 25),
    ),
)  # fmt: skip

TICKETS = story(
    "ticket_sales",
    [
        bill("{place} sells {list}. | For a show, {place} sells {list}.", "{k} {item} tickets at ${m} each | {k} "
             "{item} tickets for ${m} each", "adult,child,student,senior,family,front-row,balcony", "The {item} "
             "tickets bring in {d} dollars. | For the {item} tickets, it gets {d} dollars.", "Together that makes {e} "
             "dollars. | The sum is {e} dollars.", low=3, high=45),
    ],
    [
        event("total", "add", "It also makes ${n} with drinks. | Snacks bring in another ${n}.", "With this, it takes "
              "in {e} dollars. | The income grows to {e} dollars."),
        event("total", "sub", "It has to pay ${n} for the lights out of this money. | The actors get ${n} of the "
              "money.", "Then {e} dollars are left. | That leaves {e} dollars."),
        event("total", "cut", "{part} of all the money it has at that point is donated. | It pays {part} of the money "
              "it now has as rent.", "That is {d} dollars.\n{e} dollars are left. | {d} dollars go.\nIt keeps {e} "
              "dollars."),
        event("total", "div", "The {k} owners share all the money that is there in the end equally. | All the money it "
              "has in the end is divided equally among {k} clubs.", "Each gets {e} dollars. | A share is {e} dollars.",
              to="share"),
    ],
    {
        "total": "How many dollars from all this does it have in the end? | How much money, in dollars, does it have "
        "from this in the end?",
        "share": "How many dollars does each of the {k} get?",
    },
    PLACE_FACTS,
    place="a theater,a circus,a cinema,a concert hall,a puppet theater,an ice rink",
)  # fmt: skip

WAGES = story(
    "wages",
    [
        bill("{name} works as a {job}. This week, {name} works {list}. | {name} is a {job} and works {list}.", "{k} "
             "hours on {item} at ${m} an hour", "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday", "For "
             "{item}, {name} gets {d} dollars. | On {item}, {name} earns {d} dollars.", "Together that is {e} dollars. "
             "| The pay so far is {e} dollars.", low=8, high=40, to="money"),
    ],
    MONEY,
    MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name} rides {n} minutes to work by bus.", 13, 70),
    ),
    job="waiter,gardener,painter,driver,cleaner,lifeguard,cook,babysitter,tutor",
)  # fmt: skip

SEATS = story(
    "festival_seats",
    [
        bill("For a festival, workers set up {list}. | At a village festival there are {list}.", "{k} rows of {item} "
             "with {m} seats each | {k} rows of {item} that have {m} seats each", "red chairs,blue "
             "chairs,benches,folding chairs,wooden chairs,plastic chairs", "The {item} give {d} seats. | On the {item} "
             "there are {d} seats.", "In total there are {e} seats. | Together that makes {e} seats.", low=4, high=40),
    ],
    [
        event("total", "sub", "{n} of the seats are kept free for helpers. | {n} of the seats are wet and cannot be "
              "used.", "Then {e} seats are left for guests. | That leaves {e} seats.", to="free"),
        event("total", "sub", "Guests already sit on {n} of the seats. | {n} of the seats are already taken by guests.",
              "{e} seats are still free. | That leaves {e} free seats.", to="free"),
        event("free", "cut", "Then guests take {part} of the seats that are left. | A choir comes and takes {part} of "
              "the seats still left.", "They take {d} seats.\n{e} seats are free then. | That is {d} seats.\nSo {e} "
              "seats are still left."),
        event("free", "div", "The seats that are left then are shared equally by {k} school classes. | {k} school "
              "classes get the seats that are left, the same number for each class.", "Each class gets {e} seats. | "
              "That is {e} seats for each class.", to="class"),
        event("total", "div", "The seats are given to {k} villages, the same number to each. | All seats are divided "
              "equally among {k} clubs.", "Each gets {e} seats. | One share is {e} seats.", to="village"),
        event("free", "mul", "For each of the seats that are left then, a guest pays ${k}. | The seats still left are "
              "sold at ${k} each.", "They bring in {e} dollars. | That makes {e} dollars.", to="income"),
    ],
    {
        "total": "How many seats are there in all? | How many seats do all these rows have together?",
        "free": "How many seats are left? | How many seats are left for other guests?",
        "class": "How many seats does each class get?",
        "village": "How many seats does each of the {k} get?",
        "income": "How many dollars are paid for these seats?",
    },
    (
        ("The festival lasts {n} hours.", 5, 70),
        ("The stage is {n} feet wide.", 15, 60),
        ("It is {n} degrees outside that day.", 11, 95),
    ),
)  # fmt: skip

SHIPPING = story(
    "truck_load",
    [
        bill("A truck is loaded with {list}. | Workers load a truck with {list}.", "{k} {item} of {m} pounds each | "
             "{k} {item} that weigh {m} pounds each", "crates,barrels,sacks,tables,boxes,machines,bags of "
             "cement,doors,beams", "The {item} weigh {d} pounds. | The weight of the {item} is {d} pounds.", "Together "
             "that is {e} pounds. | The load is {e} pounds.", low=5, high=60),
    ],
    [
        event("total", "sub", "At one stop, {n} pounds are taken off the truck. | A customer takes {n} pounds of the "
              "load.", "Then {e} pounds are on the truck. | {e} pounds are left."),
        event("total", "add", "At another stop, {n} pounds are added. | {then}another {n} pounds are put on the truck.",
              "Now the load is {e} pounds. | That makes {e} pounds.", high=200),
        event("total", "cut", "{then}{part} of the load that is on the truck is taken off. | A store takes {part} of "
              "the load that is on the truck at that point.", "That is {d} pounds.\n{e} pounds stay on the truck. | "
              "{d} pounds are taken off.\nThe truck keeps {e} pounds."),
        event("total", "reach", "The truck may carry {n} pounds. | The highest load that is allowed is {n} pounds.",
              "It can take {e} more pounds. | There is room for {e} more pounds.", to="room"),
        event("total", "div", "At the end the load that is on the truck is spread evenly over {k} carts. | All that is "
              "on the truck is then moved to {k} carts, the same weight on each.", "Each cart gets {e} pounds. | That "
              "is {e} pounds on a cart.", to="cart"),
    ],
    {
        "total": "How many pounds is the load of the truck in the end? | How many pounds are on the truck at the end?",
        "room": "How many more pounds can the truck take? | How many pounds may still be added?",
        "cart": "How many pounds are on each cart?",
    },
    (
        ("The truck is {n} feet long.", 13, 60),
        ("The driver has been driving for {n} years.", 3, 40),
        ("The truck drives at {n} miles per hour.", 25, 65),
    ),
)  # fmt: skip

RECIPE = story(
    "recipe",
    [
        bill("For a feast, {name} makes {list}. | {name} cooks for a feast and makes {list}.", "{k} bowls of {item} "
             "with {m} ounces in each bowl | {k} bowls of {item} that hold {m} ounces each",
             "rice,soup,beans,lentils,corn,pasta,stew,salad,couscous,potatoes", "The bowls of {item} hold {d} ounces. "
             "| That is {d} ounces of {item}.", "Together that is {e} ounces. | Adding gives {e} ounces.", low=4,
             high=36),
    ],
    [
        event("total", "add", "{who} also has {n} ounces of bread and adds it to the food. | {then}{friend} brings {n} "
              "more ounces of food.", "That makes {e} ounces. | Now it is {e} ounces.", high=90),
        event("total", "sub", "{n} ounces of the food are spilled. | {who} gives {n} ounces of all this food to "
              "{friend}.", "Then {e} ounces are left. | That leaves {e} ounces.", high=90),
        event("total", "div", "All the food that is there in the end is divided into {k} equal servings. | {k} guests "
              "get equal servings of all the food that is there at the end.", "Each serving has {e} ounces. | One "
              "serving is {e} ounces.", to="serving"),
        event("total", "div", "In the end {who} makes servings of {k} ounces from all the food that is there. | All "
              "the food {he} has in the end is put on plates as servings of {k} ounces each.", "That is enough for {e} "
              "servings. | {name} gets {e} servings.", to="servings"),
        event("servings", "mul", "Each guest pays ${k} for one serving, and all are sold. | Every serving is sold for "
              "${k}.", "The servings bring in {e} dollars. | {name} gets {e} dollars.", to="income"),
    ],
    {
        "total": "How many ounces of food does {name} have in the end? | How many ounces is that in all, at the end?",
        "serving": "How many ounces is one serving?",
        "servings": "How many servings does that make? | How many servings are there?",
        "income": "How many dollars does {name} get for them?",
    },
    (
        *PERSON_FACTS,
        ("{name}'s kitchen is {n} feet long.", 9, 40),
        ("{name}'s cookbook has {n} pages.", 90, 400),
    ),
)  # fmt: skip

STORIES: tuple[Story, ...] = (SHOPPING, POSTAGE, TICKETS, WAGES, SEATS, SHIPPING, RECIPE)
