"""Children's stories from a grammar. Everything here was written for this project.

A template is text with {a|b|c} choices, which may nest, and $slots. One table of slots serves a whole story, so names,
kinds, objects and causes stay the same from its first sentence to its last.
"""
import re

KINDS = """fox rabbit bear mouse owl frog cat dog duck hedgehog squirrel turtle pony lamb goat badger
beaver otter mole deer kitten puppy elephant lion robot dragon penguin panda girl boy""".split()
ANIMALS = [k for k in KINDS if k not in ("robot", "dragon", "girl", "boy")]
HELPERS = "owl crow badger toad tortoise heron goat swan hare donkey goose wolf".split()
BOYS = """Tom Ben Max Sam Pip Leo Finn Otto Hugo Milo Jack Toby Felix Oscar Rufus Jasper Bruno Teddy
Charlie Theo Barney Monty Ned Gus Rory Bertie Basil Archie""".split()
GIRLS = """Lily Mia Nora Anna Lucy Rosie Daisy Ella Ruby Molly Poppy Tilly Hazel Clara Sophie Ivy Maya
Lola Betty Penny Luna Willow Fern Bella Zoe Nina Tess Olive""".split()
NAMES = BOYS + GIRLS
ADJECTIVES = """little small young brave clever kind shy cheerful curious gentle playful quiet merry friendly tiny
happy""".split()
COLORS = "red blue green yellow white black brown purple orange pink silver golden".split()
TOYS = "ball kite boat drum lantern hat scarf bell whistle basket spoon button key umbrella".split()
FOODS = "apples pears berries nuts cookies carrots pancakes plums cherries peaches cakes buns".split()
POTS = "vase bowl cup".split()
HOMES = ["in a cozy burrow under an old oak tree", "in a small house at the edge of the forest",
         "near a quiet river", "on a green hill", "in a little village by the sea", "beside a blue lake",
         "in a warm barn on a farm", "in a hollow log near the meadow", "in a stone cottage by the mill",
         "in a tall tree in the middle of the wood", "at the end of a long winding lane", "behind the old windmill"]
PLACES = ["the meadow", "the forest", "the river", "the hill", "the beach", "the market", "the park", "the old bridge",
          "the pond", "the orchard", "the garden", "the mill"]
SPOTS = ["under a bush", "behind a big rock", "in the tall grass", "next to the path", "inside a hollow tree",
         "beside the well", "under the bench", "between two roots", "behind the fence", "at the foot of the stairs"]
TIMES = ["One day", "One morning", "One sunny morning", "One windy afternoon", "Early one morning",
         "One bright spring day", "One summer day", "One cold autumn day", "One evening", "One rainy day"]
SKILLS = [("sing", "song"), ("dance", "dance"), ("paint", "picture"), ("swim", "race"), ("whistle", "tune"),
          ("juggle", "trick"), ("play the flute", "tune"), ("bake", "cake"), ("read", "story"), ("draw", "picture"),
          ("skate", "turn")]
FEARS = [("the dark", "It was very dark inside the cave.", "a small lantern", "a cave"),
         ("deep water", "The water was cold and deep.", "a strong log", "the river"),
         ("thunder", "The thunder rolled over the hills.", "a warm blanket", "the old barn"),
         ("high places", "The branch was very high.", "a long ladder", "the tallest tree"),
         ("loud noises", "The crowd was very loud.", "a soft hat", "the busy market"),
         ("the forest", "The trees were tall and the path was narrow.", "a ball of string", "the forest")]
BUILDS = [("a boat", "boat", "It sank at once", "sail across the lake", "sailed"),
          ("a tree house", "tree house", "The floor fell down", "see the whole valley", "stood firm"),
          ("a bridge", "bridge", "It broke in the middle", "cross the stream", "held"),
          ("a cart", "cart", "The wheels came off", "carry the harvest home", "rolled"),
          ("a kite", "kite", "It fell into the mud", "touch the clouds", "flew"),
          ("a raft", "raft", "The ropes came loose", "float down the river", "floated")]
TRAPS = [("the mud", "the rope"), ("a thorn bush", "the rope"), ("a deep hole", "the ladder"),
         ("an old net", "a sharp shell"), ("a hollow log", "a long stick"), ("the ice", "a wooden board")]
NOISES = [("tap, tap, tap", "a branch that tapped on the window"), ("scratch, scratch", "a beetle that walked on the roof"),
          ("whoo, whoo", "the wind that blew through an empty bottle"), ("drip, drip, drip", "rain that fell into a bucket"),
          ("creak, creak", "the old gate that swung in the wind"), ("bump, bump", "an apple that rolled down the stairs")]
TREASURES = ["a box of old books", "a chest of shiny shells", "a jar of honey", "a bag of flower seeds",
             "a little music box", "a bundle of warm scarves", "a map of the stars"]
GOALS = [("find the end of the rainbow", "the rainbow"), ("see the sea", "the sea"), ("touch the moon", "the moon"),
         ("climb the blue mountain", "the blue mountain"), ("find the first snow", "the first snow"),
         ("visit the lighthouse", "the lighthouse")]
SEEDS = [("sunflower", "tall yellow sunflowers"), ("pumpkin", "round orange pumpkins"), ("bean", "long green beans"),
         ("strawberry", "sweet red strawberries"), ("carrot", "crunchy carrots"), ("tulip", "bright tulips")]
WISHES = ["a mountain of candy", "a crown of gold", "a castle on a cloud", "a hundred balloons", "a pair of wings"]

OPENINGS = [
    "Once upon a time, there {was|lived} a $adj $k named $N. $He lived $home.",
    "Once upon a time, $ak named $N lived $home. $N was {very|always} $adj.",
    "{Long ago|A long time ago}, there {was|lived} a $adj $k named $N. $He lived $home.",
    "There was once a $adj $k who lived $home. {$His name was $N.|Everyone called $him $N.}",
    "$N was a $adj $k. $He lived $home{ with $his mother| with $his family|}."]

PLOTS = {
    "lost": """
$N had a $col $toy. {It was a gift from $his grandmother.|$He took it everywhere.|$He loved it more than anything.}

$time, $N {went to|played at} $place with the $col $toy. {A strong wind began to blow.|$He ran and jumped and
laughed.} When it was time to go home, the $toy was gone! "Oh no!" {said|cried} $N. "Where is my $col $toy?" $He
looked $spot. {It was not there.|There was nothing.} $He looked $spot2. It was not there{ either|}.

{Then|Soon} $N met $afk named $M. "Why are you sad?" asked $M. "I lost my $col $toy," said $N. "{Do not worry|Do not
cry}," said $M. "{I will help you|Let us look together}." The two {friends|of them} looked {high and low|everywhere}.
At last $M {looked|peeked} $spot3. "{Look|Come here}!" $fe {called|shouted}. "Here it is!" The $col $toy was $spot3.

$N {hugged $M|jumped for joy}. "Thank you, $M!" $he said. "{You are a true friend|You are so kind}." {Then they played
with the $toy until the sun went down.|From that day on, they always played together.|$N let $M play with the $toy,
too.}
""",
    "fear": """
$N was {afraid|very afraid} of $fear. {When $his friends went near $fplace, $he stayed at home.|$He never told anyone
about it.|The others sometimes laughed at $him.}

$time, $N heard a {small|tiny} voice. "Help! Please help me!" It was $M the $fk. $M was in trouble at $fplace, and
{nobody else was near|there was no one else to help}. $N {trembled|took a deep breath}. $fearline "I am afraid," $he
{whispered|said}, "but $M needs me." {So|Then} $he took $fearitem and went {step by step|slowly but surely}.

"{Hold on|I am here}, $M!" called $N. $He reached $M and {took $fis hand|stayed close to $fim}. {Together|Side by
side} they {found the way back|went back to a safe place}.

"You were so brave!" said $M. "I was afraid the whole time," said $N. $M smiled. "{Being brave means that you are
afraid and still do what is right|That is what being brave means}," $fe said. {From that day on, $N was not so afraid
of $fear.|After that day, $N was never afraid of $fear again.}
""",
    "build": """
$N wanted to build $thing. {"I want to $bgoal," $he said.|$He dreamed that $he could $bgoal.}

$time, $he {began|started} to work. $He {used old boards and a bit of rope|hurried and did not ask anyone}. But {when
$he tried it|soon} the $bname was not good. $bfail. {"Oh dear," said $N.|$N was very sad.}

An old $hk came by and {watched|looked at the $bname}. "{You worked too fast|You did it all alone}," said the $hk.
"{First we make a plan. Then we work step by step|Good work needs time and friends}." $N {nodded|listened}. "Will you
{help|show} me?" $he asked. "{Of course|Gladly}," said the $hk. {$M the $fk|$N's friend $M} came to help, too. They
{measured and cut|carried wood}, and the $hk showed them how to tie {strong|good} knots. They worked for
{two|three|four|five} days.

At last the $bname was ready. {They held their breath.|"Now let us try it," said $M.} It $bdone! {"We did it!" cried
$N.|Everyone cheered.} Now $N could $bgoal. "{I am glad that I asked for help|Together we can do anything}," said $N.
""",
    "share": """
$time, $N {found|picked|got} a {big|full|whole} basket of $food{ at $place|}. "{These are all for me|What a feast I
will have}," $he thought.

On the way home, $he met $afk named $M. $M {looked thin and tired|sat by the path and was very quiet}. "{I have not
eaten since yesterday|I am so hungry}," said $M. $N looked at the $food. {There were so many.|$He thought for a
moment.} "{Please take some|You may have half}," said $N. They sat down {in the shade|in the grass} and ate the $food
together. "Thank you," said $M. "{I will not forget this|You have a kind heart}."

{A week later|Some days later}, {a storm came and blew the roof off $N's house|$N was lost in the fog|$N fell and hurt
$his foot}. {And who came to help? It was $M!|Then $M came along.} "You shared your $food with me," said $M. "Now I
will help you."

{Soon everything was good again.|It did not take long, and all was well.} $N smiled. {"When you share, you get a
friend," $he said.|$He had given away some $food and found a friend.} {After that, they shared everything.|They stayed
friends for ever.}
""",
    "stuck": """
$N's best friend was $M the $fk. They {played together every day|did everything together}.

$time, they went to $place. Suddenly $M {slipped|tripped} and got stuck in $trap. "Help!" cried $M. "I cannot get
out!" $N pulled and pulled, but $M {did not move|was still stuck}.

"{Wait here|Do not be afraid}," said $N. "I will get help." $He ran {all the way|as fast as $he could} and found an
old $hk. "Please come! My friend is stuck in $trap!" "{Then we need $tool|We can use $tool}," said the $hk{ calmly|}.
They {ran|hurried} back with $tool. "{One, two, three|Ready, steady, now}!" they shouted. {Pop!|And then, with a loud
pop,} $M was free!

"Thank you," said $M. "I {was so scared|thought nobody would come}." {"I would never leave you," said $N.|"Friends
help each other," said $N.} {The $hk laughed and walked home.|They all went home and had hot soup.} {That night $M
slept very well.|From then on, they looked where they were going.}
""",
    "race": """
$N was {very fast|the fastest $k around}, and $he {liked to say so|told everyone}. "Nobody can run as fast as I can,"
$he said.

$time, $M the $fk said, "{I will race you to $place|Let us have a race to $place}." Everyone came to watch. "{One,
two, three, go|Go}!" called an old $hk. $N ran like the wind. {Soon $he was far ahead.|$He laughed and did not look
back.} But near $place there was {a small bird with a hurt wing|a baby mouse that could not cross the stream|a lost
chick that cried for its mother}. $N {ran past|did not stop}.

Then $M came along. $M stopped at once. "{Poor little one|Do not cry}," $fe said, "I will carry you home." $N won the
race, but {nobody cheered for $him|everyone was looking at $M}. They all cheered for $M.

$N {thought about it for a long time|felt ashamed}. {"Winning is not everything," $he said to $M.|"You are the real
winner," $he said to $M.} "Next time I will stop, too." $M smiled, and {they walked home together|they became good
friends}.
""",
    "goal": """
$N had a big dream. $He wanted to $goal. {Every night $he thought about $goalx.|$He talked about $goalx all day long.}

$time, $he packed {some $food|a bag} and set out. {$He walked over hills and through valleys.|The road was long.}
First $he met an old $hk. "Which way is $goalx?" asked $N. "{Follow the river|Go past the three tall trees}," said the
$hk. Then $he met $afk named $M. "May I come with you?" asked $M. "{Of course|Yes, please}," said $N. "It is better to
walk with a friend."

They walked {all day|for three days}. {Their feet were sore|They were tired}, but they sang songs and told jokes. At
last $M {pointed|looked up}. "Look!" $fe said. And there was $goalx{, bright and beautiful|}!

They {sat down and watched for a long time|were very quiet for a while}. "{It is even better than I thought|I am so
happy}," said $N. "{But the best part was the way here with you|And I am glad that you are here}," $he said to $M.
{Then they went home and told everyone about it.|On the way home they were still singing.}
""",
    "garden": """
$time, $N found a small $seed seed. {"What will it become?" $he wondered.|"I will plant it," $he thought.} $He dug a
hole, put the seed in, and covered it with soil.

Every day $N {looked at the spot|came to see the seed}. {Nothing happened.|There was only brown soil.} {"Why does it
not grow?" $he asked $M the $fk.|"It takes so long," $he said to $M the $fk.} "{You must wait|Seeds need time}," said
$M. "And it needs water." But it did not rain that {month|summer}. {The ground was dry.|The sun was hot.} So $N and $M
carried water from {the river|the well|the pond}. They carried {two|three|four|five|six} buckets every day.

Then, one morning, there was a tiny green leaf! {It grew and grew.|Every day it was a little taller.} {By the end of
the summer|After some weeks} the garden was full of $plants.

"{We did it|Look at that}!" said $N. They {invited all their friends|gave some to everyone in the village}. An old $hk
said, "These are the best I have ever seen." $N {was very proud|smiled}. {"Good things take time," $he said.|"We only
gave it water and time," said $M.}
""",
    "storm": """
$N had {a nice little house|a small house} {made of wood|made of sticks and leaves}. $He {was proud of it|had built it
all by $himself}.

$time, dark clouds came. The wind {howled|roared}, and the rain fell hard. {Crash!|Then there was a loud crash.} The
wind blew the roof away. $N was {wet and cold|very frightened}. $He ran through the rain to $M the $fk. {Knock, knock,
knock.|$He knocked on the door.} "Who is there?" asked $M. "It is me, $N. My roof is gone!" "{Come in, come in|You
poor thing, come in}," said $M. $Fe gave $N {a dry blanket and hot tea|hot soup and a warm bed}.

The next morning the sun was shining. $M {called all the friends|rang a bell, and many friends came}. {The $hk brought
nails, and the others brought wood.|An old $hk brought tools.} They all worked together, and {by the evening|before
dark} the house had a new roof.

"How can I thank you?" asked $N. "{You would do the same for us|That is what friends are for}," said $M. That night $N
lay in bed and looked at the new roof. {"It is stronger than before," $he thought.|$He felt warm and safe.}
""",
    "skill": """
$N wanted to learn to $skill. {Everyone else could $skill, but $he could not.|$He had wanted it for a long time.} $He
tried, but {it went wrong|it did not work}. {The others giggled.|$He was sad.}

$time, $he sat alone at $place. An old $hk {heard $him|sat down beside $him}. "Why are you so sad?" asked the $hk. "I
will never learn to $skill," said $N. "{Never is a long time|I could not do it at first, either}," said the $hk. "Come
here every day, and I will teach you." So every day $N came to $place. {On the first day it was hard.|At first $he
made many mistakes.} {On the second day it was a little better.|But $he did not give up.} The $hk said, "{Once
more|Again, please}." And $N tried again.

Then came the big festival. {Everyone was there.|Even $M the $fk was there.} $N {was nervous|felt $his heart beat},
but $he remembered the words of the $hk. $He {stepped forward|took a deep breath} and began. It was the best $skillx
{of the day|of all}!

{Everyone clapped and cheered.|The crowd clapped for a long time.} "How did you learn to $skill so well?" asked $M.
"{I practiced every day|I had a good teacher, and I did not give up}," said $N. {And far in the back, the old $hk
smiled.|Now $he teaches $M, too.}
""",
    "honest": """
$N's mother had a beautiful $col $pot{. It stood on the table|}. {"Please be careful with it," she always said.|She
loved it very much.}

$time, $N was playing with a ball in the house. {Bounce, bounce, crash!|The ball flew too high.} The $col $pot fell
down and broke. {"Oh no!" said $N.|$N's heart beat fast.} $He hid the pieces under the bed. {When $his mother came
home, she asked, "What happened here?"|In the evening $his mother looked at the empty table.} "{I do not know|Maybe it
was the cat}," said $N. But that night $he could not sleep. {$His tummy hurt.|$He turned left and right.}

{The next day|In the morning} $he told $M the $fk about it. "{You should tell the truth|The truth is like a stone in
your shoe. It hurts until you take it out}," said $M. So $N went to $his mother. "I broke it," $he said. "I am very
sorry."

$His mother {was quiet for a moment|looked at $him}. Then she {hugged $him|took $him in her arms}. "{I am sad about
it, but I am glad that you told me the truth|Thank you for telling the truth}," she said. They {glued the pieces
together|made a new one out of clay}. {It was not perfect, but $N loved it.|And $N never hid anything again.}
""",
    "newfriend": """
$N {had no one to play with|was often lonely}. {The other children lived far away.|$He played alone every day.}

$time, a new family moved in next door. They had $afk named $M. $N {watched from the window|hid behind the fence}.
"{Should I say hello?|What if $fe does not like me?}" $he {thought|wondered}. {$M sat in the yard with a $col $toy|$M
was playing with a $col $toy}. The $toy {rolled|flew} over the fence and landed {right in front of $N|at $N's feet}.
$N picked it up. "Is this yours?" $he asked{ in a small voice|}.

"{Yes, thank you|Oh, thank you}!" said $M. "My name is $M. Do you want to play with me?" $N {smiled|nodded}. "{Yes|I
would love to}!" $he said. "My name is $N."

They played {until dinner|all afternoon}. They {built a castle of sand|made a tent out of blankets|climbed a tree},
and they shared some $food. {"Will you come again tomorrow?" asked $M. "Every day!" said $N.|"I was afraid to say
hello," said $N. "So was I," said $M, and they both laughed.} $N was not lonely any more.
""",
    "birthday": """
It was $N's birthday. {$He woke up early and jumped out of bed.|$He was so excited.} "Today I am
{four|five|six|seven|eight}!" $he said.

But {when $he came into the kitchen, nobody was there|nobody said happy birthday}. $He went to $M the $fk. "Do you
know what day it is?" asked $N. "{It is a day like any other|I think it is Tuesday}," said $M{ and ran away|}. $He
asked the old $hk. "{I am busy|Not now}," said the $hk. "{They have all forgotten my birthday|Nobody remembers},"
thought $N. {A tear rolled down $his cheek.|$He sat down $spot and cried a little.}

In the evening, $N {walked home slowly|came home}. The house was dark. $He opened the door and ... "Surprise!"
everyone shouted. {There were lights and balloons.|The room was full of $col balloons.} $M was there, and the $hk, and
all the others.

"{We did not forget|We only wanted to surprise you}," said $M. On the table there was a big cake, and next to it was a
$col $toy with a ribbon. "{It is just what I wanted|Thank you, everyone}," said $N. {It was the best birthday
ever.|They danced and ate cake until late at night.}
""",
    "away": """
$N's mother always said, "Do not go too far into {the forest|the woods}." But $N was {curious|not listening}.

$time, $he saw a {beautiful|big} $col butterfly. $He {followed|ran after} it, past the old bridge and between the tall
trees. {When the butterfly was gone, $N looked around.|Then the butterfly flew away.} Everything looked strange. $N
was lost. "{Mother!|Hello? Is anybody there?}" called $N. {Nobody answered.|Only the wind answered.} {It was getting
dark.|The sun went down.} $N sat down $spot and began to cry.

"{Who is crying there?|Why are you crying?}" asked a voice. It was an old $hk. "I am lost," said $N. "I want to go
home." "{Look up|Dry your tears}," said the $hk. "{Do you see the bright star? It stands above your home|Listen to the
river. It flows past your home}. {Come, I will walk with you|We will follow it together}."

They walked {for a long time|through the night}. At last $N saw a light. {It was home!|$His mother stood at the door.}
"{There you are|Oh, my dear $N}!" {cried|said} $his mother and hugged $him. "I will never run away again," said $N.
{The $hk nodded and went off into the night.|$He waved to the $hk and said thank you.}
""",
    "wish": """
$time, $N found {an old|a dusty} $col bottle $spot. $He {rubbed it|pulled out the cork}. {Puff! A|With a puff of
smoke, a} tiny fairy came out. "{You have three wishes|I will give you three wishes}," said the fairy.

$N {did not think long|jumped up and down}. "I wish for $wish!" $he said. And there it was! But {soon it was in the
way|it was too much, and it made $him unhappy}. "{Take it away|I wish it was gone}," said $N. And it was gone. "That
was your second wish," said the fairy.

Then $N heard someone {cry|sigh}. It was $M the $fk. $M {was very sick|had hurt $fis leg|had lost $fis home}. {$N
looked at $M, and $N looked at the bottle.|$N had only one wish left.} $He thought about {all the things $he
wanted|gold and toys}. "I wish that $M is well and happy again," said $N. {The fairy smiled.|There was a flash of
light.} {At once|In a moment} $M {jumped up|laughed}. "{I feel so good|Everything is good again}!" said $M.

"That was the best wish of all," said the fairy, and {she was gone|she flew away}. $N had {no gold and no crown|no
wishes left}, but $he had {a happy friend|something better}. {The two friends walked home together.|"Come," said $N,
"let us play."}
""",
    "map": """
$time, $N {opened an old book|cleaned the attic}, and a map fell out. There was a $col cross on it. "{A treasure
map|This must be a treasure}!" {cried|said} $N. $He ran to $M the $fk and showed $fim the map.

"First we must go to $place," said $M. So they went to $place. {There they found an arrow made of stones.|There was an
arrow on a tree.} It pointed to $place2. They walked to $place2. {An old $hk was sleeping there.|There sat an old
$hk.} "{Answer my question, and I will let you pass|Here is a riddle}," said the $hk. "{What has hands but cannot
clap?|What gets wet while it dries?|What has teeth but cannot bite?}" $N {thought hard|closed $his eyes and thought}.
Then $he knew the answer, and the $hk let them pass.

At last they {found the $col cross|stood before a $col cross}. It was $spot. They dug and dug. {Clunk!|Then they hit
something hard.} It was a {wooden|rusty} chest. Inside was $treasure.

{"What shall we do with it?" asked $M.|"It is wonderful," said $M.} "{We will share it with everyone|Half is for you
and half is for me}," said $N. {And so they did.|They carried it home together.} {"The best treasure is a friend,"
said $M.|"Tomorrow we will look for the next map," said $N.}
""",
    "sick": """
Every {morning|day}, $N and $M the $fk met at $place. But $time2 $M did not come. $N waited and waited. {"Where is
$M?" $he wondered.|"That is strange," $he thought.}

$N went to $M's house{ and knocked on the door|}. "Come in," said a {weak|small} voice. $M was in bed. $Fis nose was
red. "I am sick," said $M. "{I cannot come out and play|My head hurts}." "{I will take care of you|Stay in bed}," said
$N. $He {asked an old $hk for help|ran to the old $hk}. "{Hot soup and honey|A good soup and a good story} will help,"
said the $hk. So $N cooked soup with carrots{ and put flowers on the table|}.

$N {sat by the bed and read a story|told a funny story} until $M {fell asleep|laughed}. {The next day $he came again,
and the day after that.|$He came every day for a week.}

{After five days|At last} $M was well again. "{Your soup was good, but your stories were better|You are the best
doctor in the world}," said $M. {They ran to $place and played all day.|Then $N sneezed. "Oh no," laughed $M, "now I
will cook soup for you!"}
""",
    "noise": """
{It was late at night|The moon was shining}, and $N was in bed. Suddenly $he heard a noise: $noise. "{What was
that|What is that}?" $he whispered. {$He pulled the blanket over $his head.|$His heart beat fast.}

There it was again: $noise. "{Maybe it is a monster|It must be a ghost}," thought $N. $He {woke up|called} $M the $fk,
who was sleeping {in the next room|on the floor}. {"Do you hear it?" asked $N.|"Listen!" said $N.} "{Yes|I hear it},"
said $M. "Let us look. {We have a light|I will go with you}."

They took a $col lantern and walked {on tiptoe|very slowly}. $noisecap. It was louder now. {$N held $M's hand.|"I am
scared," whispered $N. "Me too," said $M.} They opened the door ...

... and it was only $noisex! $N and $M looked at each other. {Then they laughed and laughed.|"That is our monster!"
said $M, and they both laughed.} "{Things look smaller when you look at them|Now I am not afraid any more}," said $N.
They {drank warm milk|went back to bed}. {Soon they were fast asleep.|The noise went on, but now it sounded like a
song.}
""",
    "trade": """
$N wanted to give $his mother {a present|a gift}, but $he had no money. $He only had a $col $toy.

$time, $he walked to the market. There $he met an old $hk. "{What a nice $toy|I need a $toy}," said the $hk. "I will
give you a basket of $food for it." {$N thought about it. |}"{Good|Yes}," said $N. So $he had a basket of $food.

Then $he met $M the $fk. "{Those $food look good|I love $food}," said $M. "I have a $col2 scarf that I made myself.
{Shall we trade?|Will you trade?}" $N looked at the scarf. It was soft and warm. "{My mother is always cold in
winter|That is just right for my mother}," $he said. So $he gave $M the $food and got the $col2 scarf.

$N ran home. "{Close your eyes|I have something for you}, Mother!" $he said, and $he put the $col2 scarf around her
neck. {"How soft it is!" said $his mother.|$His mother was so happy that she cried a little.}

"Where is your $col $toy?" she asked. "I do not need it any more," said $N. "{I would rather see you warm|I like it
better when you smile}." {She hugged $him for a long time.|That was the best day of the year.}
""",
    "winter": """
{Winter was coming.|The leaves were falling.} $N gathered $food every day and {put them in the cellar|carried them
home}. $N's neighbor was $M the $fk. $M {lay in the sun|sang and danced} all day.

"{Come and help me|You should gather food, too}," said $N. "Winter will be long." "{There is plenty of time|I will do
it tomorrow}," said $M. And the next day $fe said it again. Then the first snow fell. {Everything was white and
cold.|The wind was icy.} $M looked into $fis cupboard. It was empty. {$Fe was hungry and cold.|"Oh dear," said $M.}

$M {knocked at $N's door|came to $N}. "{I was foolish|You were right}," $fe said. "Please, may I have some $food?" $N
{looked at the shelves|thought for a moment}. "{Come in|You can stay with me}," said $N. "{There is enough for two|But
in spring you will help me}."

All winter long they {sat by the fire|lived together}. $N told stories, and $M sang songs. {And when spring came, $M
was the first to work in the garden.|And the next autumn $M gathered more $food than anyone.} {"Now there is enough
for three," $fe said, and they invited the old $hk.|"Today I work," $fe said, "and in winter I will sing."}
""",
}
PLOT_NAMES = sorted(PLOTS)
HINTS = {"lost": "who lost a $toy", "fear": "who was afraid of $fear", "build": "who built $thing",
         "share": "who shared some $food", "stuck": "who helped a friend", "race": "who ran a race",
         "goal": "who wanted to $goal", "garden": "who planted a seed", "storm": "and a storm",
         "skill": "who learned to $skill", "honest": "who told the truth", "newfriend": "who found a friend",
         "birthday": "and a birthday", "away": "who got lost", "wish": "who had three wishes",
         "map": "and a treasure map", "sick": "and a sick friend", "noise": "who heard a noise",
         "trade": "who made a trade", "winter": "and the winter"}

# How much a choice prefers what stands first: of two, the first has 0.5 ** (1 / LEAN). 1 makes all choices equally likely; above 1
# the most likely continuation leads the next by a margin, so that greedy text depends on few near ties.
LEAN = 1.0


def pick(rnd, seq):
    return seq[int(rnd() * len(seq))]


def lean(rnd, seq, turn=0):
    """A choice that prefers the start of seq after rotating it by so many places."""
    return seq[(int(rnd() ** LEAN * len(seq)) + turn) % len(seq)]


def with_article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def mend_articles(text):
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def parse_template(text):
    """-> list of parts: text, ("$", slot) or ("|", [lists of parts])"""
    at = 0

    def sequence(stop):
        nonlocal at
        parts, start = [], at
        while at < len(text) and text[at] not in stop:
            if text[at] not in "{$":
                at += 1
                continue
            parts.append(text[start:at])
            if text[at] == "{":
                choices = []
                while text[at] != "}":
                    at += 1
                    choices.append(sequence("|}"))
                parts.append(("|", choices))
                at += 1
            else:
                end = at + 1
                while end < len(text) and text[end].isalnum():
                    end += 1
                parts.append(("$", text[at + 1:end]))
                at = end
            start = at
        return parts + [text[start:at]]
    return sequence("")


def expand(template, slots, rnd, parsed={}):
    """Fills the slots and makes the choices. Paragraphs end at blank lines; other line ends count as spaces."""
    if template not in parsed:
        flat = "\n\n".join(" ".join(p.split("\n")) for p in template.strip("\n").split("\n\n"))
        parsed[template] = parse_template(flat)
    out = []

    def walk(parts):
        for p in parts:
            if isinstance(p, str):
                out.append(p)
            elif p[0] == "$":
                out.append(slots[p[1]])
            else:
                walk(lean(rnd, p[1]))
    walk(parsed[template])
    return mend_articles("".join(out))


def make_slots(rnd, kind=None, name=None, friend_kind=None):
    """All slots of one story. Every kind of hero rotates the lists by another amount, so its own favourites come first."""
    k = kind or lean(rnd, KINDS)
    turn, odd = 5 * KINDS.index(k), KINDS.index(k) % 2

    def choose(seq, *but):
        while True:
            x = lean(rnd, seq, turn)
            if x not in but:
                return x

    def pronouns(girl, he, his, him):
        he_, his_, him_ = ("she", "her", "her") if girl else ("he", "his", "him")
        return {he: he_, he.capitalize(): he_.capitalize(), his: his_, his.capitalize(): his_.capitalize(), him: him_}

    girl = name in GIRLS if name else k == "girl" or (k != "boy" and rnd() < (0.7 if odd else 0.3))
    friend_girl = rnd() < (0.3 if odd else 0.7)
    s = dict(k=k, ak=with_article(k), N=name or choose(GIRLS if girl else BOYS), himself="herself" if girl else "himself")
    s.update(pronouns(girl, "he", "his", "him"))
    s.update(pronouns(friend_girl, "fe", "fis", "fim"))
    s["M"] = choose(GIRLS if friend_girl else BOYS, s["N"])
    s["fk"] = friend_kind or choose(KINDS, k, "girl", "boy")
    s["afk"] = with_article(s["fk"])
    s["hk"] = choose(HELPERS, k, s["fk"])
    s["spot"] = choose(SPOTS)
    s["spot2"] = choose(SPOTS, s["spot"])
    s["spot3"] = choose(SPOTS, s["spot"], s["spot2"])
    s["place"] = choose(PLACES)
    s["place2"] = choose(PLACES, s["place"])
    s["col"] = choose(COLORS)
    s["col2"] = choose(COLORS, s["col"])
    s["time"] = choose(TIMES)
    s["time2"] = s["time"][0].lower() + s["time"][1:]
    for slot, seq in (("adj", ADJECTIVES), ("home", HOMES), ("toy", TOYS), ("food", FOODS), ("pot", POTS),
                      ("treasure", TREASURES), ("wish", WISHES)):
        s[slot] = choose(seq)
    for slots, seq in (("fear fearline fearitem fplace", FEARS), ("thing bname bfail bgoal bdone", BUILDS),
                       ("trap tool", TRAPS), ("noise noisex", NOISES), ("goal goalx", GOALS), ("seed plants", SEEDS),
                       ("skill skillx", SKILLS)):
        s.update(zip(slots.split(), choose(seq)))
    s["noisecap"] = s["noise"].capitalize()
    return s


def story(rnd, kind=None, name=None, plot=None, friend_kind=None, short=False):
    """-> (text, slots, plot). short: in one paragraph."""
    slots = make_slots(rnd, kind, name, friend_kind)
    plot = plot or lean(rnd, PLOT_NAMES, 3 * KINDS.index(slots["k"]))
    text = expand(lean(rnd, OPENINGS), slots, rnd) + " " + expand(PLOTS[plot], slots, rnd)
    if rnd() < 0.75:
        text += "\n\nThe end."
    return (text.replace("\n\n", " ") if short else text), slots, plot
