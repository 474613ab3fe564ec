"""Stories of buying, selling and earning."""

from codd.training.problems.story import Event, Story, event, opening, story
from codd.training.problems.world import BAKED, FLOWERS, FRUIT, PERSON_FACTS, PLACE_FACTS

MONEY: tuple[Event, ...] = (
    event("money", "sub", "{then}{who} spends ${n} of the money on {buy}. | {who} uses ${n} of the money to buy {buy}.",
          "After buying {buy}, {name} has {e} dollars left. | That leaves {name} with {e} dollars."),
    event("money", "add", "{who} also gets ${n} from {his} grandmother and adds it to the money. | {then}{friend} "
          "gives {him} ${n} as a gift.", "With the extra money, {name} has {e} dollars. | {name} then has {e} dollars "
          "in all.", high=90),
    event("money", "cut", "{then}{who} donates {part} of the money {he} now has to an animal shelter. | {who} gives "
          "{part} of all the money {he} has at that point to {friend}.", "{name} gives away {d} dollars.\n{name} keeps "
          "{e} dollars. | The part that goes away is {d} dollars.\nSo {name} still has {e} dollars."),
    event("money", "div", "{who} divides all the money {he} now has equally among {his} {k} nieces. | {then}{who} "
          "donates all the money {he} has at that point in equal parts to {k} charities.", "Each of the {k} gets {e} "
          "dollars. | One share is {e} dollars.", to="share"),
    event("money", "reach", "With the money {he} now has, {name} wants to buy {goal}, which costs ${n}. | {name} plans "
          "to buy {goal} with this money, but it costs ${n}.", "{name} still needs {e} dollars. | The missing amount "
          "is {e} dollars.", to="short"),
)  # fmt: skip
MONEY_ASKS = {
    "money": "How much money, in dollars, does {name} have in the end? | How many dollars does {name} end up with? | "
    "How many dollars does {name} have now?",
    "share": "How many dollars is each share? | How many dollars does each of them receive?",
    "short": "How many more dollars does {name} need? | How much more money, in dollars, does {name} need for it?",
}

FRUIT_STAND = story(
    "fruit_stand",
    [
        opening("stock", "start", "{name} has {n} {things} at {his} market stall. | There are {n} {things} at {name}'s "
                "fruit stand when it opens. | {name} brings {n} {things} to the farmers' market.", low=25, high=500),
        opening("stock", "groups", "{name} brings {k} crates of {things} to the market, with {m} {things} in each "
                "crate. | {name} runs a fruit stand. A truck delivers {k} crates, each holding {m} {things}.", "The "
                "{k} crates hold {e} {things}. | {name} starts with {e} {things}.", low=12, high=60),
    ],
    [
        event("stock", "sub", "{who} sells {n} {things} before lunch. | In the morning, customers buy {n} of the "
              "{things}. | A school cook buys {n} {things} from {him}.", "After selling {n}, {name} has {e} {things} "
              "left. | That leaves {e} {things} on the stand."),
        event("stock", "sub", "{n} of the {things} turn out to be bruised, so {he} throws them away. | {who} finds {n} "
              "rotten {things} and throws them out.", "Without the bad ones, there are {e} {things}. | Throwing {n} "
              "away leaves {e} {things}.", high=60),
        event("stock", "add", "{then}a farmer delivers {n} more {things}. | {friend} brings {him} {n} more {things}.",
              "With the delivery, {name} has {e} {things}. | Now there are {e} {things}."),
        event("stock", "cut", "{then}a restaurant buys {part} of the {things} {he} has at that moment. | {then}{who} "
              "sells {part} of all the {things} {he} now has to a juice bar.", "This sale takes {d} "
              "{things}.\nAfterwards {name} has {e} {things}. | The buyer takes {d} {things}.\nThere are {e} {things} "
              "left."),
        event("stock", "sub groups", "{then}{k} customers buy {m} {things} each. | {k} families each buy {m} of the "
              "{things}.", "These customers buy {d} {things}.\nSo {e} {things} are left. | Together they take {d} "
              "{things}.\n{name} then has {e} {things}.", high=25),
        event("stock", "mul", "{who} sells all the {things} {he} now has for ${k} each. | In the end {who} sells every "
              "one of the {things} still on the stand at ${k} apiece.", "Selling them brings in {e} dollars. | {name} "
              "earns {e} dollars.", to="money"),
        event("stock", "div", "{who} packs all of the {things} on the stand into bags of {k}. | {who} puts all the "
              "{things} {he} now has into bags, {k} to a bag.", "That fills {e} bags. | {name} needs {e} bags.",
              to="bags"),
        event("bags", "mul", "{who} sells every bag for ${k}. | All the bags are sold at ${k} a bag.", "The bags bring "
              "in {e} dollars. | {name} gets {e} dollars for the bags.", to="money"),
        *MONEY,
    ],
    {
        "stock": "How many {things} does {name} have left? | How many {things} are on the stand now?",
        "bags": "How many bags does {name} fill? | How many bags of {things} are there?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("The stand next to {name}'s sells {n} kinds of cheese.", 4, 45),
        ("There are {n} other stalls at the market.", 5, 70),
    ),
    things=FRUIT,
)  # fmt: skip

BAKERY = story(
    "bakery",
    [
        opening("stock", "start", "A bakery makes {n} {things} in the morning. | {name} bakes {n} {things} for {his} "
                "bakery. | Before sunrise, {name}'s bakery has {n} {things} ready.", low=20, high=600),
        opening("stock", "groups", "{name} the baker fills {k} trays with {m} {things} each. | A bakery bakes {k} "
                "trays of {things}, and every tray holds {m} of them.", "The trays hold {e} {things}. | {k} trays make "
                "{e} {things}.", low=6, high=48),
    ],
    [
        event("stock", "add groups", "{then}another {k} trays with {m} {things} each come out of the oven. | {then}{k} "
              "more batches of {m} {things} are baked.", "The new ones are {d} {things}.\nNow the bakery has {e} "
              "{things}. | That adds {d} {things}.\nIn all there are {e} {things}.", high=40),
        event("stock", "sub", "{n} of the {things} are sold before noon. | By ten o'clock, customers have bought {n} "
              "of the {things}.", "After these sales, {e} {things} remain. | That leaves {e} {things}."),
        event("stock", "sub", "{n} {things} get burnt and cannot be used. | Someone drops a tray, and {n} of the "
              "{things} are ruined.", "Without the spoiled ones, {e} {things} remain. | Only {e} {things} are still "
              "good.", high=40),
        event("stock", "cut", "{then}{part} of the {things} on hand go to a nearby cafe. | {then}a hotel buys {part} "
              "of the {things} that the bakery now has.", "The order is {d} {things}.\nThe bakery keeps {e} {things}. "
              "| That takes away {d} {things}.\nAfter that, {e} {things} are left."),
        event("stock", "div", "All the {things} that the bakery now has are packed in boxes of {k}. | The bakery puts "
              "all of its {things} into boxes that hold {k} each.", "That makes {e} boxes. | The {things} fill {e} "
              "boxes.", to="boxes"),
        event("stock", "div", "The {things} that are there now are shared equally by {k} food banks. | The bakery "
              "divides all of its {things} equally among {k} schools.", "Each place gets {e} {things}. | Divided by "
              "{k}, that is {e} {things}.", to="each"),
        event("boxes", "mul", "All of these boxes are sold for ${k} each. | The bakery then sells every box it has for "
              "${k}.", "The boxes bring in {e} dollars. | Selling the boxes earns {e} dollars.", to="income"),
        event("boxes", "sub", "{then}{n} of the boxes are given to the staff. | The mayor takes {n} of the boxes for a "
              "party.", "There are {e} boxes left. | That leaves {e} boxes.", high=30),
        event("income", "sub", "The flour and butter cost ${n}. | The bakery pays ${n} for the ingredients.", "After "
              "paying for the ingredients, {e} dollars remain. | The profit is {e} dollars."),
    ],
    {
        "stock": "How many {things} are left at the bakery? | How many {things} does the bakery have now?",
        "boxes": "How many boxes of {things} does the bakery have now? | How many boxes of {things} are there in the "
        "end?",
        "each": "How many {things} does each of them get? | How many {things} go to each one?",
        "income": "How many dollars does the bakery have from the boxes after this? | How much money, in dollars, does "
        "the bakery make with the boxes?",
    },
    (
        *PLACE_FACTS,
        ("The oven was heated to {n} degrees.", 180, 480),
        ("The bakery opened {n} years ago.", 3, 99),
    ),
    things=BAKED,
)  # fmt: skip

ORDERS = story(
    "orders_and_returns",
    [
        opening("stock", "start", "A web shop has {n} {things} in its warehouse. | An online store starts the week "
                "with {n} {things}. | {n} {things} are stored in the warehouse of a shop.", low=40, high=800),
        opening("stock", "pair", "A store has {n} {things} on display and {m} more in the back room. | A shop owns {n} "
                "new {things} and {m} used ones.", "In total the shop has {e} {things}. | Adding both gives {e} "
                "{things}.", low=5, high=400),
    ],
    [
        event("stock", "sub", "On Monday it ships {n} {things}. | Customers order {n} of the {things} the next day.",
              "After shipping {n}, there are {e} {things}. | Then {e} {things} are in stock."),
        event("stock", "add", "{n} {things} come back as returns. | {then}customers return {n} {things} that were "
              "bought last month.", "With the returns, there are {e} {things}. | Counting the returned ones, the shop "
              "has {e} {things}.", high=60),
        event("stock", "add groups", "{then}a supplier sends {k} cartons with {m} {things} each. | The shop restocks "
              "with {k} cartons of {m} {things}.", "The cartons hold {d} {things}.\nThe stock grows to {e} {things}. | "
              "The supplier adds {d} {things}.\nThat makes {e} {things}.", high=40),
        event("stock", "sub groups", "{then}{k} schools order {m} {things} each. | The shop sends {m} {things} to each "
              "of its {k} branches.", "That takes {d} {things} out of stock.\nThere are {e} {things} left. | {d} "
              "{things} are sent out.\nSo {e} {things} remain.", high=30),
        event("stock", "cut", "An inspection shows that {part} of the {things} now in stock are faulty, and they are "
              "thrown away. | {then}the shop gives {part} of the {things} in stock to a charity.", "That is {d} "
              "{things} to remove.\nThe shop keeps {e} {things}. | {d} {things} go.\n{e} {things} stay."),
        event("stock", "div", "All {things} in stock are then stacked equally on {k} shelves. | The remaining stock of "
              "{things} is spread evenly over {k} shelves.", "Each shelf holds {e} {things}. | One shelf gets {e} "
              "{things}.", to="shelf"),
        event("stock", "mul", "The shop sells all the {things} in stock for ${k} each. | In a sale, every one of the "
              "{things} now in stock is sold at ${k}.", "The sale brings in {e} dollars. | The shop takes in {e} "
              "dollars.", to="income"),
        event("income", "sub", "It costs ${n} to advertise the sale. | The shop pays ${n} for shipping.", "After the "
              "cost, {e} dollars are left. | Subtracting the cost leaves {e} dollars.", to="profit"),
        event("profit", "div", "The {k} owners share the rest of the money equally. | What is left of the money is "
              "shared equally by the {k} owners.", "Each owner gets {e} dollars. | One owner's share is {e} dollars.",
              to="owner"),
        event("income", "div", "The {k} owners share the money from the sale equally. | The income is shared equally "
              "by the {k} owners.", "Each owner gets {e} dollars. | One owner's share is {e} dollars.", to="owner"),
    ],
    {
        "stock": "How many {things} does the shop have in stock now? | How many {things} are in stock at the end?",
        "shelf": "How many {things} are on each shelf?",
        "income": "How much money, in dollars, does the sale bring in? | How many dollars does the shop get in the "
        "sale?",
        "profit": "How many dollars of the income does the shop have left? | How much money, in dollars, is left from "
        "the sale after this cost?",
        "owner": "How many dollars does each owner get? | How much, in dollars, is the share of one owner?",
    },
    (
        *PLACE_FACTS,
        ("The shop's website was made {n} months ago.", 5, 90),
        ("The shop also sells {n} kinds of tea.", 4, 60),
    ),
    things="lamps,phone cases,water bottles,umbrellas,board games,speakers,backpacks,mugs,alarm clocks,blankets",
)  # fmt: skip

FLOWER_SHOP = story(
    "flower_shop",
    [
        opening("stock", "start", "{name} owns a flower shop and has {n} {things}. | In {name}'s flower shop there are "
                "{n} {things}.", low=30, high=500),
        opening("stock", "groups", "{name} buys {k} bundles of {m} {things} for {his} flower shop. | {name} cuts "
                "{things} from {k} flower beds and gets {m} {things} from each bed.", "{name} has {e} {things}. | That "
                "makes {e} {things}.", low=8, high=50),
    ],
    [
        event("stock", "sub", "{n} of the {things} wilt overnight. | The heat ruins {n} of the {things}.", "Without "
              "the ruined ones, there are {e} {things}. | {e} {things} are still fresh.", high=80),
        event("stock", "sub groups", "{who} makes {k} bouquets with {m} {things} in each. | {then}{who} decorates {k} "
              "tables, using {m} {things} for each table.", "{name} uses {d} {things}.\nThat leaves {e} {things}. | "
              "This needs {d} {things}.\n{e} {things} are not used.", high=24),
        event("stock", "add", "{then}a grower brings {n} more {things}. | {who} picks another {n} {things} in {his} "
              "garden.", "Now {name} has {e} {things}. | Together that is {e} {things}."),
        event("stock", "cut", "{then}{who} uses {part} of the {things} {he} now has for a wedding. | A hospital takes "
              "{part} of the {things} {he} has at this point.", "That takes {d} {things}.\n{name} has {e} {things} "
              "left. | {d} {things} are taken.\n{e} {things} remain in the shop."),
        event("stock", "div", "{who} ties all the {things} that are in the shop now into bunches of {k}. | {who} ties "
              "all the {things} {he} now has into bunches of {k}.", "{name} makes {e} bunches. | That gives {e} "
              "bunches.", to="bunches"),
        event("bunches", "mul", "Every bunch is sold for ${k}. | {who} sells each bunch for ${k}.", "The bunches earn "
              "{e} dollars. | {name} takes in {e} dollars.", to="money"),
        event("stock", "mul", "{who} sells all the {things} that are now in the shop at ${k} each. | Each one of the "
              "{things} {he} now has is sold for ${k}.", "{name} earns {e} dollars. | The {things} bring in {e} "
              "dollars.", to="money"),
        *MONEY,
    ],
    {
        "stock": "How many {things} does {name} have now? | How many {things} are in the shop at the end?",
        "bunches": "How many bunches does {name} make? | How many bunches of {things} are there?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("The shop has been open for {n} years.", 3, 15),
        ("There are {n} vases in the window.", 4, 60),
    ),
    things=FLOWERS,
)  # fmt: skip

BICYCLES = story(
    "bicycle_repair",
    [
        opening("money", "groups", "{name} repairs bicycles and charges ${m} for each one. This week {he} repairs {k} "
                "bicycles. | {name} fixes {k} bicycles and is paid ${m} for each.", "{name} earns {e} dollars. | The "
                "repairs bring in {e} dollars.", low=8, high=70),
        opening("bikes", "start", "{name} has {n} bicycles to repair in {his} workshop. | {n} bicycles are waiting in "
                "{name}'s repair shop.", low=8, high=150),
        opening("bikes", "pair", "{name}'s workshop gets {n} road bikes and {m} mountain bikes to repair.", "In all "
                "there are {e} bikes. | {name} gets {e} bikes.", low=4, high=60),
    ],
    [
        event("bikes", "sub", "{who} finishes {n} of them on Monday. | On the first day {who} repairs {n} of them.",
              "Then {e} bikes are still to be repaired. | {name} has {e} bikes left to repair.", high=50),
        event("bikes", "add", "{then}customers bring {n} more bikes to repair. | A school sends {n} more bikes to fix.",
              "Now {e} bikes are waiting. | The number of waiting bikes is {e}.", high=50, limit=200),
        event("bikes", "sub groups", "{then}{who} repairs {m} bikes a day for {k} days. | For {k} days {who} fixes {m} "
              "of the bikes every day.", "In these {k} days {he} repairs {d} bikes.\nSo {e} bikes are left. | {name} "
              "fixes {d} bikes.\nAfter that, {e} bikes are waiting.", high=12),
        event("bikes", "div", "{who} and {his} helpers can repair {k} bikes a day from now on. | From then on, the "
              "shop repairs {k} of the remaining bikes every day.", "The rest takes {e} days. | They need {e} days.",
              to="days"),
        event("bikes", "mul", "{who} repairs all the bikes that are still waiting and gets ${k} for each. | Each of "
              "the bikes still waiting is then repaired for ${k}.", "{name} earns {e} dollars. | That brings in {e} "
              "dollars.", to="money"),
        event("money", "sub groups", "{who} has to buy {k} tires for ${m} each. | {then}{who} pays for {k} new chains "
              "at ${m} each.", "The parts cost {d} dollars.\n{name} has {e} dollars left. | {name} pays {d} "
              "dollars.\nThat leaves {e} dollars.", high=30),
        *MONEY,
    ],
    {
        "bikes": "How many bikes are still waiting to be repaired? | How many bikes does {name} still have to repair?",
        "days": "How many days will the remaining bikes take? | In how many days are all the bikes repaired?",
    } | MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("There are {n} tools on the wall of the workshop.", 13, 80),
    ),
)  # fmt: skip

SAVINGS = story(
    "savings",
    [
        opening("money", "start", "{name} has ${n} in {his} piggy bank. | {name} has saved ${n}. | At the start of the "
                "year, {name} has {n} dollars in savings.", low=15, high=600),
        opening("money", "groups", "{name} saves ${m} every week for {k} weeks. | For {k} months, {name} puts ${m} a "
                "month into an empty jar.", "{name} saves {e} dollars. | That comes to {e} dollars.", low=5, high=80),
    ],
    [
        event("money", "add groups", "{then}{who} mows {k} lawns for ${m} each. | {who} walks the neighbors' dogs {k} "
              "times and gets ${m} each time.", "This work earns {d} dollars.\nThen {name} has {e} dollars. | {name} "
              "earns {d} dollars.\nTogether that is {e} dollars.", high=40),
        event("money", "sub groups", "{then}{who} buys {k} {items} for ${m} each. | {who} pays ${m} each for {k} "
              "{items}.", "The {items} cost {d} dollars.\n{name} has {e} dollars left. | {name} pays {d} "
              "dollars.\nThat leaves {e} dollars.", high=25),
        event("money", "mul", "{then}{his} parents give {him} enough to make it {times} as much. | Over the next year "
              "{his} savings grow to {times} that amount.", "Now {name} has {e} dollars. | The savings grow to {e} "
              "dollars.", high=4),
        *MONEY,
    ],
    MONEY_ASKS,
    (
        *PERSON_FACTS,
        ("{name}'s piggy bank weighs {n} grams.", 150, 900),
        ("{name} has had the same jar for {n} months.", 5, 70),
    ),
    items="books,T-shirts,posters,board games,scarves,plants,hats,video games",
)  # fmt: skip

AUCTION = story(
    "auction",
    [
        opening("bid", "start", "At an auction, somebody makes a first bid of ${n} for {lot}. | {lot} is offered at an "
                "auction with a first bid of ${n}.", low=10, high=300),
        opening("bid", "groups", "The first bid for {lot} at an auction is ${m}, and the second bid is {k} times as "
                "high.", "The second bid is {e} dollars.", low=5, high=60, limit=500),
    ],
    [
        event("bid", "add", "{then}{name} bids ${n} more than that. | {name} raises the bid by ${n}.", "{name}'s bid "
              "is {e} dollars. | The bid rises to {e} dollars.", high=200),
        event("bid", "add", "{then}{friend} raises the bid by ${n}. | {friend} then offers ${n} more.", "Then the bid "
              "is {e} dollars. | {friend} offers {e} dollars.", high=200),
        event("bid", "mul", "{then}a collector makes a bid that is {times} as high. | A museum calls in and bids "
              "{times} that amount.", "The new bid is {e} dollars. | That bid is {e} dollars.", high=4),
        event("bid", "add groups", "{then}the bid is raised {k} times by ${m} each time. | {k} raises of ${m} each "
              "follow.", "The raises add up to {d} dollars.\nThe bid is now {e} dollars. | Together the raises are {d} "
              "dollars.\nThat makes a bid of {e} dollars.", high=40),
        event("bid", "sub", "The last bid wins, and the seller pays a fee of ${n} out of it. | This is the final "
              "price, and the auction house keeps ${n} of it.", "The seller gets {e} dollars. | After the fee, {e} "
              "dollars are left.", to="paid", high=99),
        event("bid", "cut", "The last bid wins, and the auction house keeps {part} of it. | This is the final price, "
              "and {part} of it goes to the auction house.", "The auction house gets {d} dollars.\nThe seller receives "
              "{e} dollars. | The fee is {d} dollars.\nThat leaves {e} dollars for the seller.", to="paid"),
        event("bid", "div", "That is the winning bid, and {k} friends pay it together in equal parts. | The last bid "
              "wins; it was made by a club whose {k} members share the cost equally.", "Each person pays {e} dollars. "
              "| One part is {e} dollars.", to="each"),
        event("paid", "div", "The seller divides all the money that is left equally among {k} grandchildren. | What "
              "the seller then has left is given in equal parts to {k} museums.", "Each one gets {e} dollars. | A "
              "share is {e} dollars.", to="split"),
        event("paid", "sub", "{then}the seller spends ${n} of the money on a dinner. | The seller also pays ${n} for "
              "the transport.", "The seller keeps {e} dollars. | {e} dollars remain.", high=120),
    ],
    {
        "bid": "How many dollars is the last bid? | How high is the bid now, in dollars?",
        "paid": "How many dollars does the seller have left? | How much money, in dollars, does the seller keep?",
        "each": "How many dollars does each person pay? | How much, in dollars, does each one have to pay?",
        "split": "How many dollars does each one of them get?",
    },
    (
        ("There are {n} people in the auction room.", 14, 160),
        ("The auction house is {n} years old.", 12, 150),
        ("In the hall, {n} other items are on display.", 13, 90),
        ("The auction began {n} minutes late.", 3, 50),
    ),
    lot="an old clock,a painting,a silver vase,a marble statue,an antique chair,a carpet,a signed guitar,a chess set",
)  # fmt: skip

STORIES: tuple[Story, ...] = (FRUIT_STAND, BAKERY, ORDERS, FLOWER_SHOP, BICYCLES, SAVINGS, AUCTION)
